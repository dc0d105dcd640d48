"""The engine's runner on a worker: in this process, or in a child that holds weights and KV cache."""
