"""What runs inside the engine's processes. Only here is code that knows vLLM's internals."""
