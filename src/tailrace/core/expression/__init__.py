"""The user's pipeline: the server's match and expression language on the raw bytes of events.

``compile_stages`` turns the stages into closures; nothing is decoded but what an operator needs. What cannot be
evaluated exactly as mongod does is refused by name.
"""

from tailrace.core.expression import operators as operators  # fills the registry
from tailrace.core.expression.stages.pipeline import CompiledPipeline, compile_stages
from tailrace.core.expression.values.collation import Collation, parse_collation

__all__ = ["Collation", "CompiledPipeline", "compile_stages", "parse_collation"]
