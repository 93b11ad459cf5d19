"""Where PyTorch traces a call it sees one operator, which computes the same bits."""

from __future__ import annotations

import importlib
import shutil
from typing import Any

import pytest

import tilewise as tw

torch = pytest.importorskip("torch")
tt = importlib.import_module("tilewise.torch")
support = importlib.import_module("tests.frontends.support")
assert_same_bits, pages_of, tensors = support.assert_same_bits, support.pages_of, support.tensors

BACKENDS = ["eager", "aot_eager", "inductor"]


def operator_calls() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    q, k, v = tensors()
    (k_pages, table), (v_pages, _) = pages_of(k), pages_of(v)
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    starts = torch.tensor([0, 3, 10]), torch.tensor([0, 30, 140], dtype=torch.int32)
    offset = torch.tensor([65, 30])
    return {
        "attention": ((q, k, v), {"causal": True, "q_offset": offset, "window": [9], "sinks": torch.zeros(4)}),
        "attention_varlen": (
            (*rows, *starts),
            {"q_offset": torch.tensor([27, 103]), "window": [-1, 3], "bias": torch.linspace(-2, 2, 10)[:, None]},
        ),
        "attention_paged": (
            (q, k_pages, v_pages, table, torch.tensor([70, 60])),
            {
                "causal": True,
                "threads": 1,
                "softcap": 2.0,
                "alibi_slopes": torch.rand(2, 4),
                "mask": torch.eye(70)[:5] < 1,
            },
        ),
    }


def in_python(options: dict[str, Any]) -> dict[str, Any]:
    """The same options for a function instead of its operator."""
    if "window" not in options:
        return options
    sides = [None if side == -1 else side for side in options["window"]]
    return {**options, "window": sides[0] if len(sides) == 1 else tuple(sides)}


@pytest.mark.parametrize("function", ["attention", "attention_varlen", "attention_paged"])
@pytest.mark.parametrize("suffix", ["", "_lse"])
def test_operators(function: str, suffix: str) -> None:
    operator = getattr(torch.ops.tilewise, function + suffix)
    given, options = operator_calls()[function]
    checks = torch.library.opcheck(operator, given, options)
    assert set(checks.values()) == {"SUCCESS"}
    names = [argument.name for argument in operator.default._schema.arguments]
    named = {**dict(zip(names, given, strict=False)), **options}
    pool = named.pop("threads", None)
    expected = getattr(tt, function)(
        named.pop("q"), named.pop(names[1]), named.pop(names[2]), **in_python(named), pool=pool, return_lse=bool(suffix)
    )
    assert_same_bits(operator(*given, **options), expected)
    half = [x.half() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in given]
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in half]
        fake_options = {n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        fake = operator(*fakes, **fake_options)
    real = operator(*half, **options)
    for x, y in zip(fake, real, strict=True) if suffix else [(fake, real)]:
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


def test_backward_of_an_operator_says_so() -> None:
    q, k, v = tensors()
    o = torch.ops.tilewise.attention(q.requires_grad_(), k, v)
    with pytest.raises(RuntimeError, match=r"backward through tilewise\.attention"):
        o.sum().backward()


@pytest.fixture
def compiled() -> Any:
    def compile(function: Any, backend: str) -> Any:
        if backend == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
            pytest.skip("Inductor needs a C++ compiler")
        torch.compiler.reset()
        return torch.compile(function, fullgraph=True, backend=backend)

    yield compile
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler, about itself
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_as_one_graph(backend: str, compiled: Any) -> None:
    def layer(q: Any, k: Any, v: Any, position: Any) -> Any:
        o, lse = tt.attention(q * 2, k, v, causal=True, q_offset=position, return_lse=True, pool=1)
        rows = tt.attention_by_token(q, k, v, window=7, q_offset=position, softcap=5.0)
        others, _ = tt.attention_by_token(q, k, v, causal=True, q_offset=position, return_lse=True)
        return rows.view(2, 5, -1) + 1, o, others.view(2, 5, -1), lse.exp()

    run = compiled(layer, backend)
    for position in (65, 66, torch.tensor([30, 20])):
        given = tensors()
        expected, got = layer(*given, position), run(*given, position)
        for x, y in zip(got[:3], expected[:3], strict=True):
            assert_same_bits(x, y)
        torch.testing.assert_close(got[3], expected[3])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("function", ["attention_varlen", "attention_paged"])
def test_ragged_and_paged_compile(function: str, compiled: Any) -> None:
    given, options = operator_calls()[function]
    names = {"attention_varlen": ("cu_seqlens_q", "cu_seqlens_k"), "attention_paged": ("block_table", "kv_len")}
    options.pop("threads", None)
    options = {**in_python(options), **dict(zip(names[function], given[3:], strict=True))}

    def layer(q: Any, k: Any, v: Any) -> Any:
        return getattr(tt, function)(q * 2, k, v, return_lse=True, **options)

    assert_same_bits(compiled(layer, "aot_eager")(*given[:3]), layer(*given[:3]))


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("out", "out cannot be given"),
        ("arena", "arena cannot be given"),
        ("pool", "pool must be a number of threads"),
        ("score", "score cannot be given while PyTorch traces a call"),
        ("keep", "keep cannot be given while PyTorch traces a call"),
    ],
)
def test_what_a_trace_cannot_have(argument: str, words: str) -> None:
    given = tensors()
    with tw.Pool(1) as pool:
        values = {"out": torch.empty((2, 4, 5, 24)), "arena": tw.Arena(), "pool": pool, "score": max, "keep": max}
        value = values[argument]
        fx = importlib.import_module("torch.fx.experimental.proxy_tensor")
        with pytest.raises(NotImplementedError, match=words):
            fx.make_fx(lambda q: tt.attention(q, *given[1:], **{argument: value}))(given[0])


@pytest.mark.parametrize("argument", ["causal", "return_lse"])
def test_none_is_no_flag(argument: str) -> None:
    """Neither in the core nor in an operator, which has a default that must not take its place."""
    q, k, v = tensors()
    with pytest.raises(TypeError, match=f"{argument} must be True or False"):
        tt.attention(q, k, v, **{argument: None})
    with (
        torch.utils.flop_counter.FlopCounterMode(display=False),
        pytest.raises((TypeError, RuntimeError), match=argument),
    ):
        tt.attention(q, k, v, **{argument: None})


def test_gradients_are_refused_in_a_trace() -> None:
    q, k, v = tensors()
    with (
        torch.utils.flop_counter.FlopCounterMode(display=False),
        pytest.raises(NotImplementedError, match=r"^k requires"),
    ):
        tt.attention(q, k.requires_grad_(), v)


def test_tracers_see_an_operator() -> None:
    """And not memory that was filled behind their back, which they would take for a constant."""
    q, k, v = tensors()
    other = -q
    expected = tt.attention(other, k, v)
    fx = importlib.import_module("torch.fx.experimental.proxy_tensor")
    traced = fx.make_fx(lambda q: tt.attention(q, k, v, q_offset=3))(q)
    assert "tilewise.attention" in traced.code
    assert_same_bits(traced(other), expected)
    exported = torch.export.export(Layer(k, v), (q,)).module()
    assert_same_bits(exported(other), expected)


class Layer(torch.nn.Module):
    """Attention to keys and values of its own."""

    def __init__(self, k: Any, v: Any) -> None:
        super().__init__()
        self.register_buffer("k", k)
        self.register_buffer("v", v)

    def forward(self, q: Any) -> Any:
        return tt.attention(q, self.k, self.v)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, about itself
def test_jit_trace_sees_an_operator() -> None:
    q, k, v = tensors()
    traced = torch.jit.trace(lambda q: tt.attention(q, k, v), q)
    assert_same_bits(traced(-q), tt.attention(-q, k, v))
