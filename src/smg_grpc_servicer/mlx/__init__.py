"""The MLX worker: mlx-lm's batch generator behind `mlx.grpc.engine.MlxEngine`."""
