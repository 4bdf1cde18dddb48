"""Tests that the performance gate finds a slower library, passes equal ones, and says when it
cannot measure. See --help.

Most tests use libraries that compute nothing, whose times can be chosen.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

root = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(root / "bench"), str(root / "bench" / "gate")]
sys.dont_write_bytecode = True
import perf_gate
import slots

# Its attention is called once for the comparison of the outputs and once to calibrate; then it
# takes longer than a sample is meant to be, so that there are 4 calls a round.
stub = """
#include <mha.h>
#include <string.h>
#include <time.h>

#ifdef MHA_EQUAL_SCORES
#define DATA(array) (array).data
#define READ_CACHE(args) (args)->cache_read
#else /* before version 0.1.0 */
#define DATA(array) (array)
#define READ_CACHE(args) ((args)->flags & MHA_CACHE_READ ? (args)->cache : 0)
#endif

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * 1e3 + time.tv_nsec * 1e-6;
}

uint32_t mha_version(void) { return VERSION; }
uint32_t mha_instruction_sets(void) { return SETS; }
static mha_status refuse(mha_error *e, const char *message) {
  return strcpy(e->message, message), 3;
}
mha_status mha_layer_pack_size(const mha_layer_config *c, const mha_layer_weights *w,
                               const mha_layer_options *o, size_t *b, mha_error *e) {
  const int are_weights = c->struct_size == sizeof *c && w->struct_size == sizeof *w &&
                          DATA(w->w_qkv) && DATA(w->w_o);
  return refuse(e, are_weights ? "there are no layers here" : "these are no weights");
}
mha_status mha_kv_cache_size(const mha_kv_cache_config *c, size_t *b, mha_error *e) {
  *b = 64;
  if (c->struct_size == sizeof *c && c->k_type == MHA_TYPE_INT8) return 0;
  return refuse(e, "this is no cache of int8");
}
mha_status mha_kv_cache_init(const mha_kv_cache_config *c, void *m, size_t b, mha_kv_cache **cache,
                             mha_error *e) {
  return *cache = m, 0;
}
mha_status mha_kv_cache_view(void *m, size_t b, mha_kv_cache **cache, mha_error *e) {
  return *cache = m, 0;
}
mha_status mha_kv_cache_append(mha_kv_cache *cache, int64_t s, int64_t n, const float *k,
                               const float *v, mha_error *e) {
  return 0;
}
mha_status mha_attention_workspace(const mha_attention_args *a, size_t *b, mha_error *e) {
  return *b = 0, 0;
}
mha_status mha_attention(const mha_attention_args *a, void *w, size_t b, mha_error *e) {
  static int calls;
  const int round = (calls++ - 2) / 4;
  const double milliseconds = round % 2 ? ODD : EVEN, begin = now();
  const int has_keys = DATA(a->k) && DATA(a->v), has_cache = READ_CACHE(a) != 0;
  if (a->struct_size != sizeof *a || !DATA(a->q) || has_keys == has_cache) {
    return refuse(e, "these are other arguments");
  }
  const int64_t count = a->batch * a->n_q * a->num_heads * a->head_dim;
  for (int64_t i = 0; i < count; ++i) ((float *)DATA(a->output))[i] = OUTPUT * a->n_q;
  for (volatile int i = 0; i < WORK; ++i) continue;
  while (now() - begin < milliseconds) continue;
  return 0;
}
"""
recurrent = """
mha_status mha_recurrent_attention_workspace(const mha_recurrent_args *a, size_t *b,
                                             mha_error *e) {
  return *b = 0, 0;
}
mha_status mha_recurrent_attention(const mha_recurrent_args *a, void *w, size_t b, mha_error *e) {
  mha_attention_args args = {.struct_size = sizeof args, .batch = a->batch, .n_q = a->rows};
  args.num_heads = a->num_v_heads, args.head_dim = a->head_dim;
  args.q = a->q, args.k = a->k, args.v = a->v, args.output = a->output;
  return mha_attention(&args, w, b, e);
}
"""
unused = (
    "layer_pack",
    "layer_view_size",
    "layer_view",
    "forward_workspace",
    "forward",
    "kv_cache_truncate",
)

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--library", required=True, help="a libmha.so")
parser.add_argument(
    "--work", type=pathlib.Path, required=True, help="a folder to work in, which is emptied"
)
parser.add_argument("--cc", default="cc", help="the C compiler")
parser.add_argument(
    "--old-structs",
    action="store_true",
    help=(
        "only the comparison with a library whose structs are those before version 0.1.0, from the"
        " history in git; exits with 77, which ctest shows as skipped, where there is no such"
        " history"
    ),
)
arguments = parser.parse_args()
work, result = arguments.work.resolve(), arguments.work.resolve() / "result.json"


def gate(expected, *words, says=""):
    """Runs the gate, which has to end with the expected status and to print `says`."""
    result.unlink(missing_ok=True)
    done = subprocess.run(
        [
            root / "tools" / "perf_gate.sh",
            "--build",
            work / "build",
            "--json",
            result,
            *map(str, words),
        ],
        capture_output=True,
        text=True,
    )
    command = f"tools/perf_gate.sh {' '.join(map(str, words))}"
    print(f"$ {command}\n{done.stdout}{done.stderr}exit status {done.returncode}\n", flush=True)
    if done.returncode != expected:
        sys.exit(f"{command} ended with status {done.returncode} instead of {expected}.")
    if says not in done.stdout + done.stderr:
        sys.exit(f"{command} does not say '{says}'.")
    if expected in (2, 4, 5) and (done.stdout or result.exists()):
        sys.exit(f"{command} cannot measure, and reports something all the same.")


def library(
    name,
    include=root / "include",
    version=100,
    sets="~0u",
    output="1.0f",
    even=6.4,
    odd=6.4,
    work_done=0,
    more="",
):
    source, path = (
        work / f"{name}.c",
        (
            include.parent / "lib" / f"{name}.so"
            if include != root / "include"
            else work / f"{name}.so"
        ),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    # Functions that are never called have no declarations: each is defined under a name that mha.h
    # does not have.
    names = [
        f'int unused_{each}(void) __asm__("mha_{each}");\nint unused_{each}(void) {{ return 3; }}'
        for each in unused
    ]
    source.write_text("\n".join([stub, more, *names, ""]))
    done = subprocess.run(
        [
            arguments.cc,
            "-shared",
            "-fPIC",
            "-I",
            include,
            f"-DVERSION={version}",
            f"-DOUTPUT={output}",
            f"-DSETS={sets}",
            f"-DEVEN={even}",
            f"-DODD={odd}",
            f"-DWORK={work_done}",
            source,
            "-o",
            path,
        ]
    )
    if done.returncode:
        sys.exit(f"{source} does not compile.")
    return path


def shapes(*lines):
    path = work / "shapes.txt"
    path.write_text("# what the test measures\n" + "\n".join(lines) + "\n")
    return path


def moved_fields():
    """Headers in which fields of the arguments changed places. A gate that gave both libraries the
    same bytes would find different results."""
    include = work / "moved" / "include"
    shutil.copytree(root / "include", include)
    header = include / "mha.h"
    text, count = re.subn(
        r"(  int64_t batch;[^\n]*\n)(  int64_t n_q;[^\n]*\n)", r"\2\1", header.read_text()
    )
    if count != 2:
        sys.exit(
            "The arguments in mha.h no longer begin with batch and n_q; bring moved_fields() in"
            " perf_gate_test.py up to date."
        )
    header.write_text(text)
    return include


def old_headers(commit="494eeafa36"):
    """The headers of a commit before version 0.1.0, whose calls have a pointer for each array, and
    a flag for a cache that is only read."""
    include = work / "old" / "include"
    include.mkdir(parents=True)
    for name in ("mha.h", "mha_options.h"):
        done = subprocess.run(
            ["git", "-C", root, "show", f"{commit}:include/{name}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        if done.returncode:
            print(
                f"skipped: git has no commit {commit} here, whose headers are compared with those"
                " of the working tree. In a shallow clone: git fetch --unshallow"
            )
            sys.exit(77)
        (include / name).write_bytes(done.stdout)
    return include


def check(what, found, expected):
    if found != expected:
        sys.exit(f"{what}: {found} instead of {expected}.")


def states():
    """Of made-up rates, alone and with no-ops, since no test can make another machine's thread run
    on this core."""
    quiet, slow, busy, little = (100, 100), (80, 79), (100, 66), (100, 94)
    for before, after, expected in (
        (quiet, quiet, "quiet"),
        (quiet, slow, "quiet"),
        (busy, busy, "busy"),
        (quiet, busy, "mixed"),
        (busy, quiet, "mixed"),
        (little, little, "mixed"),
        (little, busy, "mixed"),
        # The other thread multiplies, too.
        ((50, 50), (50, 33), "busy"),
    ):
        check(
            f"the state between {before} and {after}",
            slots.state_of(before, after, (100, 1)),
            expected,
        )
    for what, rates, best in (
        ("a core, once undisturbed", [quiet, busy, (98, 100)], (100, 1)),
        ("a core that is always busy", [busy, (90, 60)], (100, 6 / 7)),
        ("a core of few slots", [(100, 88), (100, 60)], (100, 0.88)),
        ("no loop for this core", [(0, 0)], (0, 6 / 7)),
    ):
        check(what, slots.best_of(rates), best)
    check("a core of few slots", slots.state_of((100, 88), (100, 88), (100, 0.88)), "quiet")
    check("no loop for this core", slots.state_of((0, 0), (0, 0), (0, 6 / 7)), "unknown")


def verdict(*rounds, names=("base", "new")):
    """Of a shape whose rounds have these samples, (seconds, state) of each version."""
    found = perf_gate.Result(None)
    found.rounds = [[samples * 4 for samples in versions] for versions in rounds]
    found.choose(names)
    found.judge(0.05)
    return found


def like_with_like():
    quiet, slow, busy, mixed = ([(1, "quiet")], [(1.2, "quiet")], [(1.5, "busy")], [(1.3, "mixed")])
    for what, rounds, expected in (
        ("quiet against busy samples", [[quiet, busy]] * 20, ("any", "too_noisy", None)),
        (
            "equal in quiet, which are enough",
            [[quiet, quiet]] * 7 + [[busy, [(2, "busy")]]] * 20,
            ("quiet", "ok", 2 / 1.5),
        ),
        ("slower in quiet", [[quiet + busy, busy + slow]] * 7, ("quiet", "regression", 1)),
        (
            "equal in busy, quiet ones too few",
            [[quiet, slow]] * 6 + [[busy, busy]] * 7,
            ("busy", "ok", 1),
        ),
        (
            "slower in busy",
            [[quiet, slow]] * 6 + [[busy, [(1.6, "busy")]]] * 7,
            ("busy", "regression", 1.6 / 1.5),
        ),
        (
            "neither quiet nor busy",
            [[quiet, busy], [mixed, mixed], [mixed + quiet, mixed + busy]] * 7,
            ("mixed", "ok", None),
        ),
        (
            "an architecture without such rates",
            [[[(1, "unknown")]] * 2] * 7,
            ("unknown", "ok", None),
        ),
    ):
        found = verdict(*rounds)
        check(what, (found.state, found.verdict, found.busy_ratio), expected)
    # Of more samples, the fastest would be faster: as many of each count.
    check(
        "as many samples of each",
        perf_gate.times_in("quiet", [[[(3, "quiet"), (1, "quiet")], [(3, "quiet"), (1, "busy")]]]),
        [[3], [3]],
    )
    found = verdict(*[[slow, quiet, [(1.06, "quiet")]]] * 7, names=("older", "old", "new"))
    check(
        "the fastest base",
        (found.base_name, found.verdict, found.ratio),
        ("old", "regression", 1.06),
    )


states()
like_with_like()
shutil.rmtree(work, ignore_errors=True)
work.mkdir(parents=True)
small = "attention B=2 n=3 H=1 head_dim=16  # small"
if arguments.old_structs:
    old, new = library("old", old_headers()), library("new")
    gate(
        0,
        "--shapes",
        shapes(small, "attention n=2 past=9 H=4 kv_heads=2 head_dim=16 kv_type=int8"),
        old,
        new,
        says="No regression",
    )
    for base, other in (old, new), (new, old):
        gate(
            4,
            "--shapes",
            shapes("layer n=3 D=64 H=2"),
            base,
            other,
            says=f"refused by {other}: there are no layers here",
        )
    gate(
        0,
        "--shapes",
        shapes(small, "recurrent n=3 H=1 head_dim=16"),
        old,
        library("newer", more=recurrent),
        says="1 of 2 shapes are not in the base",
    )
    sys.exit()
steady = library("steady")
# Verdicts.
gate(0, "--shapes", shapes(small), steady, steady, says="No regression")
gate(
    1,
    "--shapes",
    shapes(small),
    steady,
    library("slower", even=7.04, odd=7.04),
    says="Regression in 1 of 1 shapes",
)
(shape,) = json.loads(result.read_text())["shapes"]
check(
    "results in JSON",
    (
        shape["verdict"],
        shape["state"] in slots.STATES,
        "unknown" in shape["states"],
        round(sum(shape["states"].values()), 6),
    ),
    ("regression", True, os.uname().machine != "x86_64", 1),
)
gate(
    0,
    "--threshold",
    "20%",
    "--shapes",
    shapes(small),
    steady,
    work / "slower.so",
    says="No regression",
)
# One round a quarter faster, one a quarter slower.
gate(
    3,
    "--shapes",
    shapes(small),
    steady,
    library("unsteady", even=5, odd=8),
    says="Too noisy to say",
)
gate(0, "--shapes", shapes(small), steady, library("moved", moved_fields()), says="No regression")
# What the base lacks is left out; what the newer one lacks is an error.
newer, both = library("newer", more=recurrent), shapes(small, "recurrent n=3 H=1 head_dim=16")
gate(0, "--shapes", both, steady, newer, says="1 of 2 shapes are not in the base")
check(
    "verdicts",
    [shape["verdict"] for shape in json.loads(result.read_text())["shapes"]],
    ["ok", "absent"],
)
gate(
    4,
    "--shapes",
    shapes("recurrent n=3 H=1 head_dim=16"),
    steady,
    newer,
    says="the base has none of the shapes",
)
gate(4, "--shapes", both, newer, steady, says="it has no recurrent attention")
# A real library: layers and caches, which no stub has.
gate(
    0,
    "--threshold",
    "1000%",
    "--rounds",
    7,
    "--shapes",
    shapes(
        "layer n=3 D=64 H=2",
        "layer n=1 past=9 D=64 H=4 causal",
        "attention n=2 past=9 H=4 kv_heads=2 head_dim=16 kv_type=int8",
        "recurrent n=3 H=2 head_dim=16",
        "layer n=3 D=64 H=2 weights=int8 arithmetic=int16",
        "layer n=3 D=64 H=2 weights=int4",
    ),
    arguments.library,
    arguments.library,
    says="No regression",
)
if shutil.which("valgrind"):
    few, more = (
        library(name, work_done=count, even=0, odd=0)
        for name, count in (("few", 10_000), ("more", 10_200))
    )
    gate(0, "--count", "--shapes", shapes(small), few, few, says="No regression")
    gate(1, "--count", "--shapes", shapes(small), few, more, says="Regression in 1 of 1 shapes")
    gate(0, "--count", "--threshold", "10%", "--shapes", shapes(small), few, more)

gate(2, says="a base and at most one version")
gate(2, steady, steady, steady, says="3 were given")
gate(2, "--fast", steady, says="--fast")
gate(2, steady, "--shapes", says="--shapes: expected one argument")
gate(2, "--threshold", "0%", steady, steady, says="percentage above 0")
gate(2, "--rounds", "6", steady, steady, says="from 7 to")

this = dict(
    re.findall(
        r"^(vendor_id|cpu family)\s*: (.*)$",
        pathlib.Path("/proc/cpuinfo").read_text(),
        re.MULTILINE,
    )
)
floor = work / "floor.txt"
if "vendor_id" in this:
    for family, status, sentence in (
        ("1" + this["cpu family"], 5, "has no floor for this processor"),
        (this["cpu family"], 4, "'no-such-floor' is neither a file nor a revision"),
    ):
        floor.write_text(f"# kind\nthis {this['vendor_id']} {family} 0,1-999 no-such-floor\n")
        gate(status, "--floor", floor, steady, says=sentence)
    # A path without spaces.
    fast, faster = (
        os.path.relpath(library(f"fast{i}", even=6.4 - i, odd=6.4 - i)) for i in range(2)
    )
    floor.write_text(f"this {this['vendor_id']} {this['cpu family']} 0-999 {fast},{faster}\n")
    gate(1, "--floor", floor, "--shapes", shapes(small), steady, says=f"ms, {faster}  ")
    gate(0, "--floor", floor, "--shapes", shapes(small), work / "fast1.so", says="Samples: ")
gate(2, "--floor", floor, steady, steady, says="at most one version")
gate(2, "--floor", floor, "--count", steady, says="cannot be combined with --count")
floor.write_text("zen3 4581ea6\n")
gate(4, "--floor", floor, steady, says="a line has a kind, a vendor")

gate(4, "no-such-revision", says="neither a file nor a revision")
gate(4, work / "steady.c", steady, says="cannot be loaded")
gate(4, steady, library("next", version=10000), says="is version 1.0.x")
gate(
    4,
    "--shapes",
    shapes(small),
    steady,
    library("other", output="1.01f"),
    says="do not compute the same function",
)
gate(
    4,
    "--shapes",
    shapes(small),
    steady,
    library("nan", output="0.0f / 0.0f"),
    says="not all finite",
)
gate(4, "--shapes", work / "no-such-file", steady, steady, says="no-such-file' cannot be opened")
gate(4, "--shapes", shapes(), steady, steady, says="has no shape")
for line, sentence in (
    ("latency n=1", "'latency' is not a kind of shape"),
    ("layer n=0 D=768 H=12", "'n=0' is not a size"),
    ("layer n=1 D=768 H=12 n_kv=3", "'n_kv=3' is not allowed"),
    ("layer n=1 D=768", "shapes.txt:2: a layer needs H="),
    ("layer n=1 D=768 H=10", "H does not divide D"),
    ("attention n=1 H=1 head_dim=8 instruction_set=sse", "'sse' is not an instruction set"),
    ("attention n=2147483647 H=2147483647 head_dim=64", "more than half of this machine's"),
    ("attention n=1 H=1 head_dim=16 threads=100000", "more threads than this machine"),
    ("attention n=1 past=64 H=1 head_dim=16 n_kv=3", "both provide keys"),
    ("attention n=1 past=64 H=1 head_dim=16 kv_type=int4", "'int4' is not a cache type"),
    ("layer n=1 D=768 H=12 weights=int3", "'int3' is not a weight type"),
    ("attention n=1 H=1 head_dim=16 weights=int8", "'weights=int8' is not allowed"),
    ("recurrent n=1 H=1 head_dim=16 causal", "'causal' is not allowed"),
    ("recurrent n=1 H=1", "recurrent needs head_dim="),
    ("attention n=1 H=1 head_dim=16 kv_type=f16", "kv_type= is the type of a cache; add past="),
    ("layer n=1 D=768 H=12", "there are no layers here"),
):  # says the stub
    gate(4, "--shapes", shapes(line), steady, steady, says=sentence)
gate(
    4,
    "--count",
    "--shapes",
    shapes(small.split("#")[0] + "instruction_set=avx512"),
    steady,
    steady,
    says="what valgrind does not know",
)
gate(
    4,
    "--count",
    "--shapes",
    shapes(small),
    steady,
    library("scalar", sets="2u"),
    says="needs an instruction set that",
)
