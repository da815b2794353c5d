"""Models as files that run without this package: ONNX, programs of torch.export, headers of C."""

__all__: list[str] = []  # fluxutils_py.export and check_export use it; users do not
