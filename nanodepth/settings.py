"""Settings: the defaults of a dataclass, then a TOML file, then flags."""
import argparse
import dataclasses
import difflib
import functools
import inspect
import re
import sys
import tomllib
import types
import typing

from nanodepth.files import UserError

def nearest(name: str, known, before: str = "") -> str:
    """' Did you mean --n_layer?', or nothing when no known name is near."""
    close = difflib.get_close_matches(name.replace("-", "_"), list(known), n=1, cutoff=0.5)
    return f" Did you mean {before}{close[0]}?" if close else ""

@functools.cache
def comments(cls) -> dict[str, str]:
    """The comment beside each field of a dataclass: the one place where a setting is explained."""
    return dict(re.findall(r"^ {4}(\w+): [^#\n]*# (.*)$", inspect.getsource(cls), re.M))

def convert(kind, value, name: str):
    """`value` (a string from a flag, or a TOML value) as the field type `kind`; UserError names the setting."""
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if type(None) in kinds and (value is None or isinstance(value, str) and value.lower() == "none"):
        return None
    kind = kinds[0]
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    try:
        if kind is bool and str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
        if kind is str and isinstance(value, str):
            return value
        if kind in (int, float) and (isinstance(value, str) or type(value) in (int, kind)):
            number = kind(value)
            if kind is int and abs(number) >= 10**18:
                raise UserError(f"{name} is {str(value)[:40]}; it must have 18 digits at most.")
            if number == number:                                        # NaN is not
                return number
    except (ValueError, OverflowError):
        pass
    raise UserError(f"{name} is {value!r}; it must be {words[kind]}.")

def amount(text: str, name: str) -> int:
    """2.0B, 500M, 20k or 123456 tokens as a whole number; UserError names the setting."""
    m = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)([kmb]?)", str(text).replace("_", "").lower())
    n = round(min(1e18, float(m[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}[m[2]])) if m else 0
    if not 1 <= n < 10**18:
        raise UserError(f"{name} is {text!r}; it must be a number of tokens, as 2.0B, 500M or 20000, and above 0.")
    return n

class Parser(argparse.ArgumentParser):
    """argparse with errors that are sentences: an unknown flag names the nearest known one.

    `refused`: flags that other projects have and this one answers with a sentence, {name: sentence}. `free`: flags
    whose value may begin with dashes.
    """

    def __init__(self, *args, refused: dict[str, str] | None = None, free=(), **kwargs):
        super().__init__(*args, allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **kwargs)
        self.refused, self.kinds, self.free = refused or {}, {}, [f"--{name}" for name in free]
        self._negative_number_matcher = re.compile(r"-(\.?\d|inf|nan)")         # argparse takes -1e-3 for a flag

    def add_fields(self, cls, skip=()) -> None:
        """One flag for each field of a dataclass, its comment as the help text; left out of the result unless given."""
        help_texts = comments(cls)
        for f in dataclasses.fields(cls):
            if f.name in skip:
                continue
            self.kinds[f.name] = f.type
            bare = {"nargs": "?", "const": "true"} if f.type is bool else {}           # `--compile` alone is true
            text = help_texts.get(f.name, "").replace("%", "%%") + f" (default: {f.default})"
            self.add_argument(f"--{f.name}", default=argparse.SUPPRESS, metavar=f.name.upper(), help=text, **bare)

    def error(self, message):
        raise UserError(f"{message}. --help lists the flags.")

    def unknown(self, name: str, what: str, before: str) -> UserError:
        known = {o[2:] for o in self._option_string_actions if o.startswith("--")}
        return UserError(self.refused.get(name) or f"there is no {what} {before}{name}.{nearest(name, known, before)}")

    def parse_args(self, argv=None, namespace=None):
        argv = list(sys.argv[1:] if argv is None else argv)
        for i in reversed(range(len(argv) - 1)):                        # --prompt --x is --prompt=--x
            if argv[i] in self.free and argv[i + 1] not in self._option_string_actions:
                argv[i:i + 2] = [f"{argv[i]}={argv[i + 1]}"]
        for word in argv:
            name = word.split("=")[0]
            if word == "--":
                break
            if name.startswith("--") and name not in self._option_string_actions:
                raise self.unknown(name[2:], "flag", "--")
        args = super().parse_args(argv, namespace)
        for name, kind in self.kinds.items():
            if hasattr(args, name):
                setattr(args, name, convert(kind, getattr(args, name), f"--{name}"))
        return args

    def read_toml(self, path) -> dict:
        """The settings of a TOML file, checked and converted as flags are. It is data: nothing in it is executed."""
        try:
            with open(path, "rb") as f:
                values = tomllib.load(f)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
            raise UserError(f"{path} is not a TOML file: {e}. A line of it looks like: n_layer = 12") from None
        except FileNotFoundError:
            raise UserError(f"there is no config file {path}.") from None
        for name in values:
            if name not in self.kinds:
                error = self.unknown(name, "setting", "")
                raise UserError(f"{path}: {error}")
        return {name: convert(self.kinds[name], v, f"{path}: {name}") for name, v in values.items()}
