"""The native CPU path: one fused forward in C++, compiled once for this machine."""
