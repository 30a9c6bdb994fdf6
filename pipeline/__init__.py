"""Train in torch, prove the conversion, serve from JAX: flows that Ray runs and MLflow remembers."""
