# Every activation as torch computes it: beside activation_math.h the only place for a new kind. test_activation.py
# compares kernels with it in float64, plain_modules.py has MLPs of it. Nothing of the library is here.
import math

# y of each kind from float64 operands: (t, sigmoid) for plain kinds, (a, b, sigmoid) for gated ones. The sigmoid is
# handed in because the error bound needs to know its argument; call it once.


def gelu(t, sigmoid):
    return t * sigmoid(2 * math.sqrt(2 / math.pi) * (t + 0.044715 * t**3))


def at_most(t):
    """t.clamp(max=7), whose slope at 7 itself is 1; torch's is 0 since 2.14."""
    return t.where(~(t > 7), 7)


ORACLE = {
    "gelu": gelu,
    "geglu": lambda a, b, sigmoid: gelu(a, sigmoid) * b,
    "glu": lambda a, b, sigmoid: sigmoid(a) * b,
    "qgelu": lambda t, sigmoid: t * sigmoid(1.702 * t),
    "qgeglu": lambda a, b, sigmoid: a * sigmoid(1.702 * a) * b,
    "relu": lambda t, sigmoid: t.relu(),
    "reglu": lambda a, b, sigmoid: a.relu() * b,
    "srelu": lambda t, sigmoid: t.relu() ** 2,
    "sreglu": lambda a, b, sigmoid: a.relu() ** 2 * b,
    "silu": lambda t, sigmoid: t * sigmoid(t),
    "swiglu": lambda a, b, sigmoid: a * sigmoid(a) * b,
    "clamped_swiglu": lambda a, b, sigmoid: at_most(a) * sigmoid(1.702 * at_most(a)) * (1 - at_most(-at_most(b))),
}
# Of two operands, whose parts lie side by side in one tensor.
GATED = tuple(kind for kind, oracle in ORACLE.items() if oracle.__code__.co_argcount == 3)
