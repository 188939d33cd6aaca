"""The vLLM worker: `vllm.grpc.engine.VllmEngine` on vLLM's own `AsyncLLM`."""
