"""Models of the transformers library on tilewise: `tilewise.transformers.register()`, then
`AutoModelForCausalLM.from_pretrained(..., attn_implementation="tilewise")`."""

from tilewise.frontends.transformers import continuous_batching, register

__all__ = ["continuous_batching", "register"]
