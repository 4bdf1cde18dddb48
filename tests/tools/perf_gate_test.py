"""Tests that the performance gate finds a slower library, passes equal ones, and says when it
cannot measure. See --help.

Most tests use libraries that compute nothing, whose times can be chosen.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys

root = pathlib.Path(__file__).resolve().parents[2]

# Its attention is called once for the comparison of the outputs and once to calibrate; then it
# takes longer than a sample is meant to be, so that there are 4 calls a round.
stub = """
#include <mha.h>
#include <string.h>
#include <time.h>

#ifdef MHA_INIT
#define CALL(args) (args)->call
#else /* before version 0.1.0 */
#define CALL(args) *(args)
#endif
#ifdef MHA_EQUAL_SCORES
#define DATA(array) (array).data
#define READ_CACHE(args) (CALL(args)).cache_read
#else /* before version 0.1.0 */
#define DATA(array) (array)
#ifdef MHA_CAUSAL
#define READ_CACHE(args) ((args)->flags & MHA_CACHE_READ ? (args)->cache : 0)
#else
#define READ_CACHE(args) ((args)->n_kv ? 0 : (args)->cache)
#endif
#endif

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * 1e3 + time.tv_nsec * 1e-6;
}

uint32_t mha_version(void) { return VERSION; }
uint32_t mha_instruction_sets(void) { return ~0u; }
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
  const int64_t count = (CALL(a)).batch * (CALL(a)).n_q * a->num_heads * a->head_dim;
  for (int64_t i = 0; i < count; ++i) ((float *)DATA(a->output))[i] = OUTPUT * (CALL(a)).n_q;
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
  mha_attention_args args = {.struct_size = sizeof args,
                             .call = {.batch = a->batch, .n_q = a->rows}};
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


def gate(expected, *words, says):
    """Runs the gate, which has to end with the expected status and to print `says`."""
    result.unlink(missing_ok=True)
    command = [root / "tools" / "perf_gate.sh", "--build", work / "build", "--json", result]
    done = subprocess.run([*command, *map(str, words)], capture_output=True, text=True)
    said = f"tools/perf_gate.sh {' '.join(map(str, words))}\n{done.stdout}{done.stderr}"
    print(f"$ {said}exit status {done.returncode}\n", flush=True)
    if done.returncode != expected or says not in said:
        sys.exit(f"The status is {done.returncode} instead of {expected}, or '{says}' is missing.")
    if expected in (2, 4, 5) and (done.stdout or result.exists()):
        sys.exit("The gate cannot measure, and reports something all the same.")


def library(name, include=root / "include", even=6.4, odd=6.4, work_done=0, more="", **macros):
    folder = work if include == root / "include" else include.parent / "lib"
    folder.mkdir(exist_ok=True)
    path, source = folder / f"{name}.so", work / f"{name}.c"
    # Functions that are never called have no declarations: each is defined under a name that mha.h
    # does not have.
    names = [
        f'int unused_{each}(void) __asm__("mha_{each}");\nint unused_{each}(void) {{ return 3; }}'
        for each in unused
    ]
    source.write_text("\n".join([stub, more, *names, ""]))
    macros = {"version": 100, "output": "1.0f", **macros}
    macros.update(even=even, odd=odd, work=work_done)
    given = [f"-D{macro.upper()}={value}" for macro, value in macros.items()]
    command = [arguments.cc, "-shared", "-fPIC", "-I", include, *given, source, "-o", path]
    if subprocess.run(command).returncode:
        sys.exit(f"{source} does not compile.")
    return path


def shapes(*lines):
    path = work / "shapes.txt"
    path.write_text("# what the test measures\n" + "\n".join(lines) + "\n")
    return path


def old_headers(commit):
    """The headers of a commit before version 0.1.0, whose calls have a pointer for each array, and
    a flag for a cache that is only read."""
    include = work / commit / "include"
    include.mkdir(parents=True)
    for name in ("mha.h", "mha_options.h"):
        done = subprocess.run(
            ["git", "-C", root, "show", f"{commit}:include/{name}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        if done.returncode and name == "mha.h":
            print(
                f"skipped: git has no commit {commit} here, whose headers are compared with those"
                " of the working tree. In a shallow clone: git fetch --unshallow"
            )
            sys.exit(77)
        if done.returncode == 0:
            (include / name).write_bytes(done.stdout)
    return include


shutil.rmtree(work, ignore_errors=True)
work.mkdir(parents=True)
small = "attention B=2 n=3 H=1 head_dim=16  # small"
linear = "recurrent n=3 H=1 head_dim=16"
if arguments.old_structs:
    new = library("new")
    floors = re.findall(r"\b[0-9a-f]{7}\b", (root / "bench" / "floor.txt").read_text())
    for commit in {"4581ea6", *floors}:
        old = library(commit, old_headers(commit))
        gate(0, "--shapes", shapes(small), old, new, says="No regression")
    old = work / "494eeaf" / "lib" / "494eeaf.so"
    cached = "attention n=2 past=9 H=4 kv_heads=2 head_dim=16 kv_type=int8"
    gate(0, "--shapes", shapes(small, cached), old, new, says="No regression")
    for base, other in (old, new), (new, old):
        says = f"refused by {other}: there are no layers here"
        gate(4, "--shapes", shapes("layer n=3 D=64 H=2"), base, other, says=says)
    newer, says = library("newer", more=recurrent), "1 of 2 shapes are not in the base"
    gate(0, "--shapes", shapes(small, linear), old, newer, says=says)
    sys.exit()
steady, slower = library("steady"), library("slower", even=7.04, odd=7.04)
# One round a quarter faster, one a quarter slower.
unsteady = library("unsteady", even=5, odd=8)
for status, says, *words in (
    (0, "No regression", steady, steady),
    (1, "Regression in 1 of 1 shapes", steady, slower),
    (0, "No regression", "--threshold", "20%", steady, slower),
    (3, "Too noisy to say", steady, unsteady),
    (4, "do not compute the same function", steady, library("other", output="1.01f")),
    (4, "not all finite", steady, library("nan", output="0.0f / 0.0f")),
    (4, "is version 1.0.x", steady, library("next", version=10000)),
    (4, "cannot be loaded", work / "steady.c", steady),
    (4, "neither a file nor a revision", "no-such-one"),
    (2, "a base and at most one version"),
    (2, "percentage above 0", "--threshold", "0%", steady, steady),
):
    gate(status, "--shapes", shapes(small), *words, says=says)
gate(4, "--shapes", shapes("layer n=1 D=768"), steady, steady, says="2: a layer needs H=")
# A real library: layers and caches, which no stub has.
of_all_kinds = shapes(
    "layer n=3 D=64 H=2",
    "layer n=1 past=9 D=64 H=4 causal",
    "attention n=2 past=9 H=4 kv_heads=2 head_dim=16 kv_type=int8",
    "recurrent n=3 H=2 head_dim=16",
    "layer n=3 D=64 H=2 weights=int8 arithmetic=int16",
    "layer n=3 D=64 H=2 weights=int4",
)
real = ("--threshold", "1000%", "--rounds", 7, arguments.library, arguments.library)
gate(0, "--shapes", of_all_kinds, *real, says="No regression")
if shutil.which("valgrind"):
    few, more = (
        library(name, work_done=count, even=0, odd=0)
        for name, count in (("few", 10_000), ("more", 10_200))
    )
    gate(0, "--count", "--shapes", shapes(small), few, few, says="No regression")
    gate(1, "--count", "--shapes", shapes(small), few, more, says="Regression in 1 of 1 shapes")

info = pathlib.Path("/proc/cpuinfo").read_text()
this = dict(re.findall(r"^(vendor_id|cpu family)\s*: (.*)$", info, re.MULTILINE))
floor = work / "floor.txt"
if "vendor_id" in this:
    floor.write_text(f"this {this['vendor_id']} 1{this['cpu family']} 0-999 no-such-floor\n")
    gate(5, "--floor", floor, steady, says="has no floor for this processor")
    # A path without spaces.
    fast, faster = (
        os.path.relpath(library(f"fast{i}", even=6.4 - i, odd=6.4 - i)) for i in range(2)
    )
    floor.write_text(f"this {this['vendor_id']} {this['cpu family']} 0-999 {fast},{faster}\n")
    gate(1, "--floor", floor, "--shapes", shapes(small), steady, says=f"ms, {faster}  ")
    gate(0, "--floor", floor, "--shapes", shapes(small), work / "fast1.so", says="Samples: ")
