"""What is shared by every framework binding: the recipes. The engine itself is the C++ library beside this file."""

from transformer_engine.common import recipe as recipe
