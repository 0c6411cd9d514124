"""Evaluate Python functions that build a configuration, without executing them."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hp_tool.errors import InputError, UnsupportedError

MAX_TEXT = 400_000
MAX_EXPRESSIONS = 20_000
"""Maximum number of expressions to evaluate in a function and its callees."""
MAX_NUMBER = 10**18
_SKIPPED_STATEMENTS = (ast.Import, ast.ImportFrom, ast.Assert, ast.Pass, ast.FunctionDef)


@dataclass(slots=True, kw_only=True)
class Call:
    """A call in the source. Later assignments may change its arguments."""

    name: str = ""
    """Dotted name; empty for a default value of which only attributes are assigned."""
    words: list[Any] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """An expression whose value is known only at run time."""

    text: str
    line: int


class Functions:
    """The functions of a Python module, and their return values."""

    def __init__(self, text: str) -> None:
        """Parse the module.

        Raises:
            InputError: The text is not valid Python.
        """
        try:
            module = ast.parse(text[:MAX_TEXT])
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise InputError(f"not a Python file: {error}"[:200], code="syntax") from None
        self._functions = {
            statement.name: statement
            for statement in module.body
            if isinstance(statement, ast.FunctionDef)
        }
        self._constants = {
            target.id: statement.value
            for statement in module.body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name)
        }
        imports = [node for node in ast.walk(module) if isinstance(node, ast.ImportFrom)]
        origins = [(import_, "." * import_.level + (import_.module or "")) for import_ in imports]
        self.modules = {
            name.asname or name.name: origin for each, origin in origins for name in each.names
        }
        """Module of each imported name. A leading dot means a relative import."""
        self._left = MAX_EXPRESSIONS

    def names_returning(self, kind: str) -> tuple[str, ...]:
        """Return the names of the functions that return a `kind`."""
        return tuple(name for name, each in self._functions.items() if _returns_kind(each, kind))

    def function_source(self, name: str) -> str:
        """Return the source of a function in the module; empty for other names."""
        function = self._functions.get(name)
        return "" if function is None else ast.unparse(function)

    def value(self, name: str, given: Mapping[str, Any] | None = None) -> Any:
        """Evaluate a function's return value: constants, lists, calls and unread expressions.

        `given` contains the arguments by parameter name.

        Raises:
            UnsupportedError: The effect of a statement is known only at run time.
            InputError: The file does not define the function.
        """
        if name not in self._functions:
            raise InputError(f"the file has no function {name}", field="config")
        values: dict[str, Any] = dict(given or {})
        try:
            for statement in self._functions[name].body:
                if isinstance(statement, ast.Return):
                    return self._value(statement.value, values)
                self._follow(statement, values)
        except RecursionError:
            raise UnsupportedError(
                f"{name} calls itself, or is nested too deeply", field="config"
            ) from None
        return None

    def _follow(self, statement: ast.stmt, values: dict[str, Any]) -> None:
        if isinstance(statement, _SKIPPED_STATEMENTS) or (
            isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        ):
            return
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            value = self._value(statement.value, values)
            for target in targets:
                if isinstance(target, ast.Name):
                    values[target.id] = value
                    continue
                holder = self._attribute_owner(target, values)
                if holder is None:
                    break
                holder.arguments[target.attr] = value  # type: ignore[attr-defined]
            else:
                return
        raise UnsupportedError(
            f"line {statement.lineno}: the effect of {_source_text(statement)} is only "
            "known at run time",
            field="config",
        )

    def _attribute_owner(self, target: ast.expr, values: dict[str, Any]) -> Call | None:
        """Return the call that owns an attribute, and create it if necessary."""
        if not isinstance(target, ast.Attribute):
            return None
        if isinstance(target.value, ast.Attribute):
            outer = self._attribute_owner(target.value, values)
            if outer is None:
                return None
            inner = outer.arguments.setdefault(target.value.attr, Call(line=target.lineno))
        else:
            inner = self._value(target.value, values)
        return inner if isinstance(inner, Call) else None

    def _value(self, node: ast.expr | None, values: dict[str, Any]) -> Any:
        self._left -= 1
        if self._left < 0:
            raise UnsupportedError(
                f"the file has more than {MAX_EXPRESSIONS} expressions", field="config"
            )
        match node:
            case None:
                return None
            case ast.Constant(value=value):
                return value
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self._value(item, values) for item in items]
            case ast.Name(id=name) if name in values:
                return values[name]
            case ast.Name(id=name) if name in self._constants:
                return self._value(self._constants[name], {})
            case ast.Attribute(value=of, attr=name):
                holder = self._value(of, values)
                if isinstance(holder, Call) and name in holder.arguments:
                    return holder.arguments[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                number = self._value(operand, values)
                if isinstance(number, int | float):
                    return -number
            case ast.BinOp(left=left, op=op, right=right):
                result = _calculate(self._value(left, values), op, self._value(right, values))
                if result is not None:
                    return result
            case ast.Call():
                return self._call(node, values)
        return Unread(text=_source_text(node), line=node.lineno)

    def _call(self, node: ast.Call, values: dict[str, Any]) -> Any:
        name = ast.unparse(node.func)
        names = [keyword.arg for keyword in node.keywords]
        if name in self._functions and None not in names:
            bound = self._bind_parameters(self._functions[name].args, node, values)
            if bound is not None:
                return self.value(name, bound)
        if name in self._functions or None in names or not name.replace(".", "").isidentifier():
            return Unread(text=_source_text(node), line=node.lineno)
        arguments = {
            keyword.arg: self._value(keyword.value, values)
            for keyword in node.keywords
            if keyword.arg is not None
        }
        return Call(
            name=name,
            words=[self._value(arg, values) for arg in node.args],
            arguments=arguments,
            line=node.lineno,
        )

    def _bind_parameters(
        self, parameters: ast.arguments, call: ast.Call, values: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Return a call's arguments by parameter name; None if some have no value."""
        positional = [each.arg for each in (*parameters.posonlyargs, *parameters.args)]
        keywords = [each.arg for each in parameters.kwonlyargs]
        if parameters.vararg or parameters.kwarg or len(call.args) > len(positional):
            return None
        defaults = dict(zip(reversed(positional), reversed(parameters.defaults), strict=False))
        pairs = zip(keywords, parameters.kw_defaults, strict=True)
        defaults |= {name: default for name, default in pairs if default is not None}
        bound = {name: self._value(default, {}) for name, default in defaults.items()}
        bound |= {
            name: self._value(word, values)
            for name, word in zip(positional, call.args, strict=False)
        }
        bound |= {each.arg: self._value(each.value, values) for each in call.keywords if each.arg}
        return bound if bound.keys() == {*positional, *keywords} else None


def _returns_kind(function: ast.FunctionDef, kind: str) -> bool:
    if function.returns is not None:
        return ast.unparse(function.returns).strip("'\"") == kind
    calls = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Call)
    ]
    return any(ast.unparse(call.value.func) == kind for call in calls)  # type: ignore[union-attr]


def _calculate(left: Any, op: ast.operator, right: Any) -> int | None:
    """Return the sum, difference, product or quotient of two integers; None if unsupported."""
    if (
        not (isinstance(left, int) and isinstance(right, int))
        or max(abs(left), abs(right)) > MAX_NUMBER
    ):
        return None
    match op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.FloorDiv() if right:
            return left // right
    return None


def _source_text(node: ast.AST) -> str:
    return ast.unparse(node).split("\n")[0][:80]
