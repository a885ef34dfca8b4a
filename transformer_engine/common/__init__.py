"""The part shared by framework bindings: the recipes. The engine itself is the C++ library in this folder."""

from transformer_engine.common import recipe as recipe
