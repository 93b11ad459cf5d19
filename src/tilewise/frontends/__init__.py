"""Attention as other libraries ask for it. Each module imports its library; the core imports none of them."""
