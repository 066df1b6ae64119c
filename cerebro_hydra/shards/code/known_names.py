"""Names of functions and attributes of which it is known what they do, whoever has them."""

from __future__ import annotations

SINKS = {
    "debug", "info", "warning", "warning_once", "warn", "error", "exception", "critical",
    "add_scalar", "set_postfix", "set_postfix_str", "set_description", "set_description_str",
}  # fmt: skip
BUILTINS = {
    "len", "int", "float", "str", "bool", "abs", "min", "max", "round", "sum", "repr", "isinstance",
    "tuple",
}  # fmt: skip
PURE = {
    "item", "tolist", "numel", "size", "dim", "mean", "sum", "norm", "max", "min", "std", "abs",
    "detach", "cpu", "float", "count", "any", "all", "keys", "values", "items", "format",
    "join", "time", "perf_counter", "monotonic", "process_time", "now", "most_common", "isnan",
    "isfinite", "isinf", "argmax", "argmin", "median", "var", "eq", "ne", "split", "strip",
    "startswith", "endswith", "lower", "upper", "sqrt", "isEnabledFor", "total_seconds",
}  # fmt: skip
FRESH = {
    "item", "tolist", "time", "perf_counter", "monotonic", "process_time", "now", "Counter",
    "defaultdict", "OrderedDict", "deque", "zeros", "ones", "full", "sum", "mean", "norm",
}  # fmt: skip
FRESH_BUILTINS = {"len", "int", "float", "str", "bool", "dict", "list", "set", "repr"}
CHANGING = {
    "append", "add", "update", "extend", "appendleft", "clear", "insert", "discard", "remove",
    "subtract",
}  # fmt: skip
BY_COMPUTED_NAMES = {
    "vars", "__dict__", "attrgetter", "asdict", "astuple", "getmembers", "__getattribute__", "dir",
    "__getattr__", "__getstate__", "setattr", "__setattr__",
}  # fmt: skip
BY_ANY_NAME = {"locals", "globals", "eval", "exec", "f_locals", "f_globals", "__globals__"}
OPERATIONS = {"__iadd__", "__setitem__", "__setattr__", "__getattr__", "__getattribute__"}
CONTEXTS = {"no_grad", "enable_grad", "inference_mode", "autocast", "record_function"}
KNOWN_DECORATORS = {"lru_cache", "cache", "staticmethod", "no_grad", "wraps", "torch", "functools"}
