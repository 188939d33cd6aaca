"""The demo model: SmolLM2-135M-Instruct as a Hugging Face directory, built once per machine."""

from __future__ import annotations

from smg_grpc_servicer.demo_model.layout import DTYPES, DType
from smg_grpc_servicer.demo_model.store import ensure_demo_model

__all__ = ["DTYPES", "DType", "ensure_demo_model"]
