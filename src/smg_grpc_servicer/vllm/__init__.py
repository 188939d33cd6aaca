"""The vLLM worker: vLLM's AsyncLLM behind `vllm.grpc.engine.VllmEngine`."""
