"""Float values as a parameter of another dtype would hold them."""

from __future__ import annotations

import numpy as np

from narrows.proto.codec import kernels
from narrows.proto.codec.kernels import F32, check_outputs, read_only
from narrows.proto.messages import DtypeName


def round_to_dtype(values: F32, dtype: DtypeName, out: F32) -> None:
    """out (n,) = values rounded to `dtype` and back, half to even, as a parameter would hold them.

    Values beyond the range become infinite, as in every such cast. May be in place.
    """
    check_outputs(values.size, out=out)
    if dtype == "bfloat16":
        kernels.round_bfloat16(read_only(values.view(np.uint32)), out.view(np.uint32))
    elif dtype == "float16":
        # An overflow is the documented result here; numpy would warn of it.
        with np.errstate(over="ignore"):
            out[:] = values.astype(np.float16)
    else:
        out[:] = values
