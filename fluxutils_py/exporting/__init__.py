"""Models as files that run without this package: ONNX, and programs of torch.export."""

__all__: list[str] = []  # fluxutils_py.export and check_export use it; users do not
