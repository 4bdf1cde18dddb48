#!/usr/bin/env python3
"""Reads the public headers as a table: what each field of each struct may be.

CONTRIBUTING.md ("Changing the interface") has the grammar of the comments.

    tools/interface.py            print the table: struct, field, and what it may be
    tools/interface.py write      write the files that follow from the table (`outputs`)
    tools/interface.py check      say whether these files are current
    tools/interface.py wrong_values FILE    write what tests pass as wrong values
    tools/interface.py javascript FOLDER    write layout.js and options.d.ts of mha-wasm
    tools/interface.py --json     the same as JSON: {"constants": ..., "structs": ...}

A field of the JSON has "field", "type", "comment" and "kind", one of: size (struct_size), reserved,
number, choice, flags, array, struct (by value), pointer (to a struct), other (opaque, function) and
result (of a struct that the library fills). Where the comment says so, it also has:

    shapes      of an array: a list of extents for each shape that is possible
    least, most the range: a number or the name of a field; "above" and "below" exclude the bound
    size        true: a width or a number of heads; most is then the common limit, 2^31 - 1
    multiple    2: even
    finite      true: neither infinite nor NaN
    default     what 0 means
    empty       what MHA_EMPTY means
    choices     {name: value} of constants; numbers and fields stand for themselves
    type_default what type 0 means in an mha_input
    null        what NULL (or data NULL) means; an array or pointer without it is required
    elements    of an array: what each number must be, "finite" or "less than infinity"
"""

import fractions
import itertools
import json
import math
import os
import pathlib
import re
import sys
import textwrap

root = pathlib.Path(__file__).resolve().parent.parent
headers = ("mha.h", "mha_options.h", "mha_tables.h", "mha_recurrent.h", "mha_extra.h")
filled_by_library = ("mha_error", "mha_call_info")
numbers = ("int64_t", "uint32_t", "int32_t", "uint8_t", "float", "double", "size_t", "uint64_t")
arrays = ("mha_input", "mha_output", "mha_matrix")
scalars = ("number", "choice", "flags")
single_max, double_max = (2 - 2.0**-23) * 2.0**127, sys.float_info.max
# Strides and types of arrays are checked with their extents, the scheduler where calls begin.
unchecked = ("mha_scheduler", "mha_strides", "mha_input", "mha_output", "mha_matrix")
fields_intro = """\
// Written by tools/interface.py from the headers: what each number of a struct may be by itself.
#include "../storage.h"
#include "rules.h"

namespace mha {

// clang-format off
#define MHA_FIELDS(S, list) \\
  template <> mha_status check_fields(const Rules &rules, const S &s) { list return MHA_OK; }
#define MHA_RULE(kind, field, ...) MHA_TRY(rules.kind(#field, s.field, __VA_ARGS__));
#define MHA_ARRAYS(S, list) \\
  template <> mha_status check_arrays(const Rules &rules, const S &s, int64_t num_heads) { \\
    list return MHA_OK; }
#define MHA_ARRAY(field, ...) MHA_TRY(rules.numbers(#field, s.field, num_heads, __VA_ARGS__));"""
wrong_intro = """\
// Written by tools/interface.py from the headers: what fields must not be, whatever others are."""
python_intro = '''\
"""Written by tools/interface.py from the headers: constants, types and names of fields, and
functions."""

constants = """\\'''
js_intro = """\
// Written by tools/interface.py from the headers: constants, and the fields of the structs. Of a
// field: - the binding sets it, ? NULL is allowed, *> written to, ~ an explicit 0 is MHA_EMPTY,
// ! there is no default, =X the default, {PREFIX: A B} its constants (| flags), [A B] a shape."""
ts_intro = """\
// Written by tools/interface.py from the headers, whose comments these are.
import type { Bytes, Doubles, Floats, Integers, KvCache, Matrix, Rows, Strides } from './mha.js';"""
# Words of shapes that are no field: of a matrix, its columns together, and functions.
other_words = ("in", "out", "qkv_dim", "ceil", "max")

number = r"-?\d+(?:\^-?\d+)?(?:/\d+)?(?: - \d+)?"
bound = rf"(?:{number}|[a-z]\w+)"
constant = r"MHA_[A-Z0-9_]+"
token = re.compile(
    r"/\*(?P<comment>.*?)\*/|(?P<field>[^\s/][^;/]*;)|(?P<blank>\n[ ]*\n)", re.DOTALL
)


class GrammarError(Exception):
    """A comment that does not follow the grammar."""


def value_of(text):
    """The number that "2^31 - 2", "2^-31", "1/2" or "INT64_MIN" writes; else the text itself."""
    if text == "INT64_MIN":
        return -(2**63)
    match = re.fullmatch(r"(-?\d+)(?:\^(-?\d+))?(?:/(\d+))?(?: - (\d+))?", text)
    if not match:
        return text
    base, power, divisor, less = (int(x) if x else None for x in match.groups())
    value = fractions.Fraction(base) ** (1 if power is None else power)
    value = value / (divisor or 1) - (less or 0)
    return int(value) if value.denominator == 1 else float(value)


def constants_of(text):
    """{name: value} of the numbers that a header defines."""
    found = re.findall(
        rf"^#define ({constant}) (0x[0-9a-f]+|\d+|INT64_MIN)u?\b", text, re.MULTILINE
    )
    return {name: value_of(x) if "x" not in x else int(x, 16) for name, x in found}


def functions_of(text):
    """{function: kinds of its parameters without the mha_error} of those that return a status: p is
    a pointer, s a size_t, i an int64_t, n an int32_t, u a uint32_t."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    found = re.findall(r"MHA_API mha_status (\w+)\(([^;]*),\s+mha_error \*error\);", text)
    words = {"size_t": "s", "uint32_t": "u", "int32_t": "n", "int64_t": "i"}
    return {
        name: "".join("p" if "*" in one else words[one.split()[0]] for one in parameters.split(","))
        for name, parameters in found
    }


def choices_of(comment, constants):
    """{name: value} of "MHA_TYPE_F32, F16 or INT8" or "MHA_TYPE_*", and whether they combine."""
    every = re.search(r"(MHA_[A-Z0-9_]+_)\*", comment)
    if every:
        return {n: x for n, x in constants.items() if n.startswith(every[1])}, False
    listed = re.search(rf"{constant}(?:(?:, | or | \| )[A-Z][A-Z0-9_]+)*", comment)
    if not listed or listed[0] in ("MHA_EMPTY", "MHA_BROADCAST"):
        return {}, False
    names = re.split(r", | or | \| ", listed[0])
    prefixes = [names[0][: end.start() + 1] for end in re.finditer("_", names[0])][::-1]
    full = [next((p + n for p in [""] + prefixes if p + n in constants), n) for n in names]
    unknown = [n for n in full if n not in constants]
    if unknown:
        raise GrammarError(f"no header defines {unknown[0]}")
    return {n: constants[n] for n in full}, " | " in listed[0]


def said_of(name, comment):
    """What follows "0 =" or "NULL =", up to the end of the clause."""
    found = re.search(rf"(?:^|[;,:.] |data ){name} = ((?:[^;.]|\.(?=\w))+)", comment)
    return found and found[1].strip()


def limits(field, kind, comment):
    """The range of a number: least and most, and whether a bound itself is excluded."""
    rule = {}
    between = re.search(rf"({bound}) \.\. ({bound})", comment)
    least, most = re.search(rf"(>=?) ({bound})", comment), re.search(rf"(<=?) ({bound})", comment)
    if between:
        rule = {"least": value_of(between[1]), "most": value_of(between[2])}
    if least and not between:
        rule.update({"least": value_of(least[2])}, **({"above": True} if least[1] == ">" else {}))
    if most and not between:
        rule.update({"most": value_of(most[2])}, **({"below": True} if most[1] == "<" else {}))
    said = between or least or most
    if said:
        rule["range"] = said[0]
    if re.search(r"\beven\b", comment):
        rule["multiple"] = 2
    if re.search(r"\bfinite\b", comment):
        rule["finite"] = True
    if kind == "int64_t":
        rule.setdefault("least", 0)
        if "most" not in rule and re.search(
            "(^|_)dims?(_|$)|heads$|^channels$|^num_(sequences|blocks)$", field
        ):
            rule.update(most=2**31 - 1, size=True)
    return rule


def row_of(struct, field, kind, comment, above, constants, structs):
    """The row of the table for one field. `above` is the comment of its group."""
    rows = structs[struct]["rows"]
    row = {"field": field, "type": kind, "comment": comment, "kind": "other"}
    pointee = re.sub(r"const |struct | ?\*", "", kind)
    if field == "struct_size":
        return {**row, "kind": "size"}
    if field.startswith("reserved"):
        return {**row, "kind": "reserved"}
    if not comment and not above and "(" not in kind:
        raise GrammarError("it has no comment")
    if struct in filled_by_library:
        return {**row, "kind": "result"}
    other = re.search(r"as in (mha_\w+)", comment)
    same = [r for r in structs[other[1]]["rows"] if r["field"] == field] if other else []
    if same and kind in numbers:
        return {**same[0], "comment": comment}
    shapes = re.findall(r"\[([^\]]+)\]", comment) or re.findall(r"\[([^\]]+)\]", above)
    like = re.search(r"the shape of (\w+)", comment)
    if like:
        shapes = [", ".join(s) for s in next(r for r in rows if r["field"] == like[1])["shapes"]]
    if "*" in kind or kind in arrays or kind == "mha_sgemm":
        null = said_of("NULL", comment) or said_of("NULL", above)
        if null or "else NULL" in comment:
            row["null"] = null or "none"
        if pointee in numbers or kind in arrays:
            if not shapes:
                raise GrammarError("an array needs its shape in brackets, such as [batch, n_q]")
            row.update(kind="array", shapes=[re.split(r", (?![^(]*\))", shape) for shape in shapes])
            for said in [row, *same]:
                found = re.search(r"\bfinite\b|less than infinity", said["comment"])
                row.update(elements=found[0]) if found else None
            type_default = re.search(r"\btype 0 = ([\w']+)", comment)
            if type_default:
                row["type_default"] = type_default[1]
        elif pointee.startswith("mha_"):
            row["kind"] = "pointer"
        return row
    if kind.startswith("mha_"):
        return {**row, "kind": "struct"}
    if kind not in numbers:
        return row
    choices, combine = choices_of(comment, constants) if kind == "uint32_t" else ({}, False)
    if choices:
        row.update(kind="flags" if combine else "choice", choices=choices)
    else:
        row.update(kind="number", **limits(field, kind, comment))
        listed = re.search(
            rf"(?:^|[;:] )((?:{bound}(?:, | or |, or ))+{bound})(?=$|[;:.])", comment
        )
        if listed:
            values = re.split(r", or |, | or ", listed[1])
            row["choices"] = {x: value_of(x) for x in values}
    for key, name in ("default", "0"), ("empty", "MHA_EMPTY"):
        said = said_of(name, comment) or (name != "0" and said_of("or " + name, comment))
        if said:
            row[key] = said
    if re.search(r"(else|otherwise) 0\b", comment):
        row["default"] = "none"
    said = {"default", "empty", "choices", "finite"} & set(row)
    if not said and not re.search(r"\.\.|[<>]", comment):
        raise GrammarError(
            'a number needs its range (">= 1", "2 .. 8"), default ("0 = 1") or values '
            '("MHA_TYPE_F32 or F16", "1 or head_dim")'
        )
    return row


def read(folder=root / "include"):
    """{"constants": {name: value}, "structs": {struct: {"header", "rows"}}, "functions": {name:
    kinds}} of the headers."""
    texts = {h: (folder / h).read_text() for h in headers if (folder / h).exists()}
    constants = {n: x for text in texts.values() for n, x in constants_of(text).items()}
    structs, errors = {}, []
    for header, text in texts.items():
        for struct, body in re.findall(r"typedef struct (\w+) \{\n(.*?)\n\} \1;", text, re.DOTALL):
            fields, above, after = [], "", 0
            for found in token.finditer(body):
                comment = " ".join(
                    re.sub(r"^\s*\*", "", found["comment"] or "", flags=re.M).split()
                )
                if found["blank"]:
                    above = ""
                elif found["field"]:
                    fields.append([found["field"][:-1], "", above])
                    after = found.end()
                elif fields and "\n" not in body[after : found.start()]:
                    fields[-1][1] = comment
                else:
                    above = comment
            rows = structs.setdefault(struct, {"header": header, "rows": []})["rows"]
            for declaration, comment, above in fields:
                declaration = " ".join(declaration.split())
                name = re.search(r"\(\*(\w+)\)|(\w+)(?:\[\d+\])?$", declaration)
                field = name[1] or name[2]
                kind = declaration if name[1] else declaration[: name.start()].strip()
                try:
                    rows.append(row_of(struct, field, kind, comment, above, constants, structs))
                except GrammarError as error:
                    errors.append(f"include/{header}: {struct}.{field}: {error} (/* {comment} */)")
    names = {row["field"] for s in structs.values() for row in s["rows"]} | set(other_words)
    for struct, table in structs.items():
        for row in table["rows"]:
            words = re.findall(r"[a-z]\w*", " ".join(x for s in row.get("shapes", []) for x in s))
            words += [x for x in (row.get("least"), row.get("most")) if isinstance(x, str)]
            errors += [
                f"include/{table['header']}: {struct}.{row['field']}: {word} is no field"
                for word in words
                if word not in names
            ]
    if errors:
        raise GrammarError("\n".join(errors))
    functions = {name: x for text in texts.values() for name, x in functions_of(text).items()}
    return {"constants": constants, "structs": structs, "functions": functions}


# ---- The table of the library's checks


def or_list(words):
    return " or ".join([", ".join(words[:-1])] * (len(words) > 1) + words[-1:])


def remedy(row):
    """What a message tells the caller to set the field to, and what the field is."""
    if row["kind"] in ("choice", "flags"):
        names = row["choices"].items()
        base = "{} (0x{:x})" if row["kind"] == "flags" else "{} ({})"
        text = or_list([base.format(n, x) for n, x in names])
        if len(text) > 72:  # further names without what they begin with, as in the headers
            prefix = os.path.commonprefix([n[: n.rindex("_") + 1] for n, _ in names])
            prefix = prefix[: prefix.rindex("_") + 1]
            text = prefix + or_list([base.format(n[len(prefix) :], x) for n, x in names])
    elif "choices" in row:
        text = or_list(list(row["choices"]))
    else:
        least = "at least 1" if "default" in row else "at least 0"
        text = row.get("range", "a finite number" if "finite" in row else least)
        text = text.replace(">= ", "at least ").replace(" .. ", " to ")
        text = text.replace("> 0", "a positive finite number").replace("> ", "more than ")
    text = "an even number, " * ("multiple" in row) + text
    if "default" in row and 0 not in row.get("choices", {}).values() and row.get("range") != ">= 0":
        text += f", or to 0 ({row['default']})"
    return text


def meaning(row):
    """What the field is, for the end of a message."""
    text = re.match(r"[^;:]*", row["comment"])[0].strip()
    if text.count("(") != text.count(")"):
        return ""
    return "" if re.search(r"MHA_|\.\.|>|finite|^\d| = |^as |^of |^$", text) else f": {text}"


def c_number(x, is_integer):
    names = {2**63 - 1: "INT64_MAX", 2**31 - 1: "INT32_MAX", 2**32 - 1: "UINT32_MAX"}
    names.update({single_max: "FLT_MAX", double_max: "DBL_MAX"})
    if abs(x) in names:
        return "-" * (x < 0) + names[abs(x)]
    power = math.frexp(x)[1] - 1 if x else 0
    if abs(power) > 30:  # only powers of two are that large or small
        return f"int64_t{{1}} << {power}" if is_integer else f"0x1p{power}"
    return str(x)


def rules_of(struct, row):
    """The rules of a field in fields.cpp; none for a field whose rule needs other fields."""
    name, kind, choices = row["field"], row["type"], row.get("choices", {})
    if row["kind"] == "reserved" and kind == "uint32_t":
        return [("range", name, "0", "0", f"0 in {struct}")]
    if row["kind"] not in scalars or "empty" in row or name == "instruction_set":
        return []
    text = remedy(row)
    if row["kind"] == "flags":
        return [("flags", name, hex(sum(choices.values())), text)]
    if choices:
        values = list(dict.fromkeys([0] * ("default" in row) + list(choices.values())))
        if any(isinstance(x, str) for x in values):
            return []
        if values == list(range(len(values))) and len(values) > 2:
            return [("range", name, "0", str(values[-1]), text)]
        return [("one_of", name, f"{{{', '.join(map(str, values))}}}", text)]
    is_integer = kind in ("int64_t", "uint32_t")
    largest = {"int64_t": 2**63 - 1, "uint32_t": 2**32 - 1, "float": single_max}
    lowest, largest = -largest.get(kind, double_max), largest.get(kind, double_max)
    least, most = row.get("least", lowest), row.get("most", largest)
    least, most = (
        x if not isinstance(x, str) else y for x, y in ((least, lowest), (most, largest))
    )
    least = 0 if is_integer and "default" in row else least
    even = [("even", name, text)] if "multiple" in row else []
    if "size" in row:
        return [("size", name, str(least), text), *even]
    limits = (c_number(x, is_integer) for x in (least, most))
    rule = "range" if is_integer else "number_or_0" if "default" in row and least > 0 else "number"
    return [(rule, name, *limits, text), *even]


def fields_source(table):
    types = [name[9:] for name in table["constants"] if name.startswith("MHA_TYPE_")]
    lines = [fields_intro, ""]
    lines += [f"static_assert(type_of(Storage::{t.lower()}) == MHA_TYPE_{t});" for t in types]
    for struct, found in table["structs"].items():
        rules = [(row, rule) for row in found["rows"] for rule in rules_of(struct, row)]
        if not rules or struct in unchecked:
            continue
        lines.append(f"\nMHA_FIELDS({struct},")
        for row, (kind, name, *limits, text) in rules:
            head = f"  MHA_RULE({', '.join([kind, name, *limits])},"
            line = f"{head} {json.dumps(text + meaning(row))})"
            line = line if len(line) < 100 else f"{head} {json.dumps(text)})"
            indent = "\n" + " " * len("  MHA_RULE(")
            if len(line) >= 100:
                parts = textwrap.wrap(text, 85, drop_whitespace=False)
                line = "".join([head, *(indent + json.dumps(part) for part in parts), ")"])
            lines.append(line)
        lines[-1] += ")"
        arrays = [row for row in found["rows"] if "elements" in row]
        lines += [f"\nMHA_ARRAYS({struct},"] if arrays else []
        for row in arrays:
            least = "-FLT_MAX" if row["elements"] == "finite" else "-MHA_INFINITY"
            lines.append(f'  MHA_ARRAY({row["field"]}, {least}, "{row["elements"]}")')
        lines[-1] += ")" * bool(arrays)
    return "\n".join(lines) + "\n}  // namespace mha\n"


# ---- The table of wrong values, which tests pass


def wrong_values_of(struct, row):
    """What a field must not be whatever other fields are, as macros of a test."""
    kind, choices = row["type"], row.get("choices", {}).values()
    least, most = (0 if isinstance(x, str) else x for x in map(row.get, ("least", "most")))
    field = f"{struct}, {row['field']}"
    if row["kind"] == "reserved":
        yield f"RESERVED({field})"
    elif row["kind"] == "flags":
        yield f"FLAGS({field}, {sum(choices):#x})"
    elif choices and all(isinstance(x, int) for x in choices):
        known = sorted({*choices, *([0] if "default" in row else [])})
        yield f"CHOICE({field}, {', '.join(map(str, known))})"
    elif row["kind"] == "number" and not choices:
        is_integer = kind not in ("float", "double")
        largest = {"float": single_max, "double": double_max, "uint32_t": 2**32 - 1}.get(
            kind, 2**63 - 1
        )
        least = 0 if is_integer and "default" in row else -largest if least is None else least
        bounds = ", ".join(c_number(x, is_integer) for x in (least, most or largest))
        yield f"SIZE({field}, {least})" if "size" in row else f"RANGE({field}, {bounds})"
        if "multiple" in row:
            yield f"EVEN({field})"
    elif row["kind"] == "struct" or kind in arrays:
        is_named = row["kind"] == "array" or kind == "mha_strides"
        yield f'PART({field}, "{is_named * (row["field"] + ".")}", {kind})'
    if row["kind"] in ("array", "pointer") and "null" not in row:
        yield f"NEEDED({field}{'.data' * (kind in arrays)})"


def wrong_source(table):
    constants = sorted({x for x in table["constants"].values() if x > 32})
    lines = [wrong_intro, f"CONSTANTS({', '.join(map(str, constants))})"]
    for struct, found in table["structs"].items():
        if struct in (*filled_by_library, "mha_allocator"):
            continue
        lines.append(f"STRUCT({struct})")
        for row in found["rows"]:
            for macro in wrong_values_of(struct, row):
                fits = len(lines[-1]) + len(macro) < 100
                lines[-1:] = [f"{lines[-1]} {macro}"] if fits else [lines[-1], macro]
    return "\n".join(lines) + "\n"


# ---- The structs and constants of Python


def python_kind(row):
    """The word by which mha/_structs.py knows a type. "out" is a pointer to what is written."""
    kind = row["type"]
    words = dict(size_t="size", uint64_t="u64", float="f32", double="f64", char="text")
    if "*" in kind or kind == "mha_sgemm":
        is_read = kind.startswith("const ") or "(" in kind or kind == "mha_sgemm"
        return "ptr" if is_read else "out"
    return words.get(kind) or re.sub(r"^(i|u)\w*?(\d+)_t$", r"\g<1>\2", kind)


def python_source(table):
    constants = [f"{name[4:]}={x}" for name, x in table["constants"].items()]
    lines = [python_intro, *textwrap.wrap(" ".join(constants), 100), '"""\n\nstructs = """\\']
    for struct, found in table["structs"].items():
        kinds = itertools.groupby(found["rows"], python_kind)
        fields = [" ".join([kind, *(row["field"] for row in rows)]) for kind, rows in kinds]
        text = f"{struct}: {', '.join(fields)}"
        lines += textwrap.wrap(text, 100, subsequent_indent="  ")
    functions = " ".join(f"{name}={kinds}" for name, kinds in table["functions"].items())
    lines += ['"""\n\nfunctions = """\\', *textwrap.wrap(functions, 100)]
    return "\n".join([*lines, '"""', ""])


# ---- The structs and constants of JavaScript


def camel(name):
    first, *rest = name.lower().split("_")
    return first + "".join(word.capitalize() for word in rest)


def js_names(row):
    """The names of a choice's constants or flags, and what of them JavaScript leaves out."""
    names = list(row["choices"])
    short = re.search(r"MHA_[A-Z0-9_]+(?:,| or| \|) ([A-Z][A-Z0-9_]*)", row["comment"])
    if short and not short[1].startswith("MHA_"):
        return names, names[1].removesuffix(short[1])
    start = os.path.commonprefix(names)
    return names, start[: start.rindex("_") + 1]


def js_extent(text, known, shape=()):
    """A number that other fields say, without blanks; None of other words."""
    words = set(re.findall(r"[a-z]\w*", text))
    if not re.fullmatch(r"[\w *+/(),-]+", text) or words - known - {"ceil", "max"}:
        return None
    if text == "n_kv" and "n_q" in shape:  # as many columns as there are keys to attend to
        return "keys"
    return re.sub(r"[a-z]\w*", lambda word: camel(word[0]), text).replace(" ", "")


def is_hidden(row):
    """Whether a field is none of JavaScript's options: the binding sets it, or it is a function, or
    only for pools."""
    of_pools = ("cache_lengths", "block_tables", "block_table_entries", "block_table_starts")
    functions = ("mha_scheduler *", "mha_sgemm", "mha_allocator *")
    return (
        row["kind"] in ("size", "reserved", "other")
        or "void" in row["type"]
        or (row["type"] == "int64_t" and row["field"].endswith("_stride"))
        or row["type"].removeprefix("const ") in functions
        or row["field"] in of_pools
    )


def js_field(row, table, known):
    """The field as layout.js has it: "i64 keyDim=queryDim"."""
    kind, name = python_kind(row), camel(row["field"])
    pointee = re.sub(r"const |struct | ?\*", "", row["type"])
    if is_hidden(row) and row["kind"] != "result":
        return f"{kind} -{name}"
    if kind in ("ptr", "out"):
        words = {"float": "f32", "double": "f64", "uint8_t": "u8", "int32_t": "i32"}
        kind = words.get(pointee, pointee.replace("int64_t", "i64")) + "*"
        kind += ">" * (not row["type"].startswith("const ") and row["kind"] == "array")
    text = f"{kind} {name}" + "?" * (row["kind"] == "array" and "null" in row)
    if row["kind"] in ("choice", "flags"):
        names, prefix = js_names(row)
        every = [x for x in table["constants"] if x.startswith(prefix)] == names and prefix[4:]
        listed = "*" if every else " ".join(x.removeprefix(prefix) for x in names)
        return f"{text}{{{'|' * (row['kind'] == 'flags')}{prefix[4:]}: {listed}}}"
    if row["kind"] == "number":
        default = js_extent(row.get("default", "?"), known)
        text += "~" * ("empty" in row)
        if default and row["type"] in ("int64_t", "uint32_t") and default != "0":
            text += f"={default}"
        elif is_needed(row) or "empty" in row:
            text += "!"
    for shape in row.get("shapes", []):
        text += f"[{' '.join(js_extent(x, known, shape) for x in shape)}]"
    return text


def is_needed(row):
    least = row.get("least", 0)
    return row["kind"] == "number" and "default" not in row and least != 0


def js_source(table):
    known = {row["field"] for s in table["structs"].values() for row in s["rows"]}
    known |= set(other_words)
    constants = (f"{name[4:]}={x}" for name, x in table["constants"].items() if abs(x) < 2**63)
    constants = f"export const constants = '{' '.join(constants)}';"
    lines = [js_intro, constants, "export const structs = `"]
    for struct, found in table["structs"].items():
        fields = (js_field(row, table, known) for row in found["rows"])
        lines.append(f"{struct}: {', '.join(fields)}")
    return "\n".join([*lines, "`;", ""])


def ts_type(row):
    kind, pointee = row["type"], re.sub(r"const |struct | ?\*", "", row["type"])
    if row["kind"] in ("choice", "flags"):
        names, prefix = js_names(row)
        return " | ".join(f"'{camel(name.removeprefix(prefix))}'" for name in names)
    if row["kind"] == "array":
        names = dict(mha_matrix="Matrix", mha_input="Rows", mha_output="Rows", float="Floats",
                     double="Doubles", uint8_t="Bytes")  # fmt: skip
        is_written = kind == "mha_output" or ("*" in kind and not kind.startswith("const "))
        return "true | " * is_written + names.get(pointee, "Integers")
    return ts_name(pointee) if pointee.startswith("mha_") else "number"


def ts_name(struct):
    return camel("x_" + struct.removeprefix("mha_"))[1:]


def ts_source(table):
    """The options of JavaScript's calls, with the comments of the headers."""
    lines = [ts_intro]
    left_out = ("mha_error", "mha_allocator", "mha_kv_pool", "mha_partials_args", *unchecked)
    for struct, found in table["structs"].items():
        if struct in left_out:
            continue
        rows, is_result = found["rows"], struct in filled_by_library
        base = " extends Call" * any(row["field"] == "call" for row in rows)
        lines.append(f"\nexport interface {ts_name(struct)}{base} {{")
        told = set()  # what the length of an array tells is not needed
        for row in rows:
            for shape in row.get("shapes", [])[:1]:
                names = [x for x in shape if re.fullmatch(r"[a-z]\w*", x)]
                told |= set(names) if len(names) == 1 and "null" not in row else set()
        for row in rows:
            if row["field"] == "call" or (row["kind"] != "result" and is_hidden(row)):
                continue
            said = row["comment"].replace("*/", "* /")
            lines += [f"  /** {said} */"] if said else []
            if row["kind"] == "flags":
                names, prefix = js_names(row)
                fields = {camel(r["field"]) for r in rows}
                start = row["field"].removesuffix("flags")
                flags = (camel(start + n.removeprefix(prefix)) for n in names)
                lines += [f"  {name}?: boolean;" for name in flags if name not in fields]
                continue
            is_data = row["kind"] == "array" and "null" not in row
            is_data &= row["type"] != "mha_output" and "*" not in row["type"][:-1]
            is_number = is_needed(row) and "empty" not in row and row["field"] not in told
            mark = "" if is_result or is_data or is_number else "?"
            lines.append(f"  {camel(row['field'])}{mark}: {ts_type(row)};")
        lines.append("}")
    return "\n".join([*lines, ""])


outputs = {
    "src/check/fields.cpp": fields_source,
    "tools/bindings/python/mha/_interface.py": python_source,
}


def main(arguments):
    try:
        table = read()
    except GrammarError as error:
        sys.exit(str(error))
    if arguments in (["write"], ["check"]):
        for name, source in outputs.items():
            if arguments == ["write"]:
                (root / name).write_text(source(table))
            elif (root / name).read_text() != source(table):
                sys.exit(f"{name} is not current: python3 tools/interface.py write")
        return
    if len(arguments) == 2 and arguments[0] == "wrong_values":
        pathlib.Path(arguments[1]).write_text(wrong_source(table))
        return
    if len(arguments) == 2 and arguments[0] == "javascript":
        for name, source in ("layout.js", js_source), ("options.d.ts", ts_source):
            pathlib.Path(arguments[1], name).write_text(source(table))
        return
    if arguments == ["--json"]:
        json.dump(table, sys.stdout, indent=1)
        return
    for struct, rows in table["structs"].items():
        for row in rows["rows"]:
            said = {k: v for k, v in row.items() if k not in ("field", "type", "comment", "kind")}
            print(struct, row["field"], row["type"], row["kind"], json.dumps(said), sep="\t")


if __name__ == "__main__":
    main(sys.argv[1:])
