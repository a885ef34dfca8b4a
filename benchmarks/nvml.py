"""The SM clock and the power of a CUDA device, by NVML's C library, which comes with the driver: no Python package. On
a CPU, or without the library, nothing is read. Measures nothing by itself."""

import ctypes

import torch

SM_CLOCK = 1  # nvmlClockType_t
POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT, in mW: nvmlDeviceGetPowerUsage is an average over a second


class _Field(ctypes.Structure):
    """nvmlFieldValue_t."""

    _fields_ = [
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("type", ctypes.c_int),
        ("status", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    ]


class Gauge:
    """Reads one device."""

    def __init__(self, device):
        self._library, self._handle = None, ctypes.c_void_p()
        if device.type != "cuda":
            return
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        handle = ctypes.byref(self._handle)
        if library.nvmlInit_v2() == 0 and library.nvmlDeviceGetHandleByUUID(uuid, handle) == 0:
            self._library = library

    def read(self):
        """(MHz, W) at this moment, or None."""
        if self._library is None:
            return None
        clock, milliwatts = ctypes.c_uint(), ctypes.c_uint()
        if self._library.nvmlDeviceGetClockInfo(self._handle, SM_CLOCK, ctypes.byref(clock)) != 0:
            return None
        field = _Field(field=POWER_INSTANT)
        status = self._library.nvmlDeviceGetFieldValues(self._handle, 1, ctypes.byref(field))
        if status == 0 and field.status == 0:
            return clock.value, (field.value & 0xFFFFFFFF) / 1e3
        if self._library.nvmlDeviceGetPowerUsage(self._handle, ctypes.byref(milliwatts)) != 0:
            return None
        return clock.value, milliwatts.value / 1e3
