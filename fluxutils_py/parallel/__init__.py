"""Processes and threads that train together."""

from fluxutils_py.parallel.comm import Communicator, SoloComm, get_communicator

__all__ = ["Communicator", "SoloComm", "get_communicator"]
