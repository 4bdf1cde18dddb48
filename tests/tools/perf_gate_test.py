"""That the performance gate finds slow kernels, lets equal ones pass, and says so when it cannot measure. See perf_gate_test.py --help.

prepare makes a repository whose revisions are this library (tag base), the same with a slower projection and fields of mha.h in another order
(slow3, slow25), and one that does not compile (broken). The others run its tools/perf_gate.sh, which builds what it compares.
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys

# Put into the files that instantiate the kernels: `project` does a share of its rows once more, which changes no result.
slowed_kernel = """
namespace mha {
namespace {

template <class>
struct Slowed;

template <class... Rest>
struct Slowed<void (*)(const Projection &, const float *, int64_t, int64_t, Rest...)> {
  static void project(const Projection &p, const float *rows, int64_t row_begin, int64_t row_end, Rest... rest) {
    make_kernels<Vector>(0, nullptr).project(p, rows, row_begin, row_end, rest...);
    const int64_t extra = ((row_end - row_begin) * PERCENT + 99) / 100;
    make_kernels<Vector>(0, nullptr).project(p, rows, row_begin, row_begin + extra, rest...);
  }
};

constexpr Kernels slowed(Kernels kernels) {
  kernels.project = Slowed<decltype(kernels.project)>::project;
  return kernels;
}

}  // namespace
}  // namespace mha

namespace mha {"""

# A library that computes nothing, to show the gate what no real one does at will. Its attention is called once for the comparison of the
# outputs and once to calibrate; then it takes longer than a sample is meant to be, so that there are 4 calls a round.
stub = """
#include <mha.h>
#include <string.h>
#include <time.h>

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * 1e3 + time.tv_nsec * 1e-6;
}

uint32_t mha_version(void) { return VERSION; }
uint32_t mha_instruction_sets(void) { return SETS; }
mha_status mha_layer_pack_size(const mha_layer_config *c, const mha_layer_weights *w, const mha_layer_options *o, size_t *b, mha_error *e) {
  strcpy(e->message, "there are no layers here");
  return 3;
}
mha_status mha_layer_pack(const mha_layer_config *c, const mha_layer_weights *w, const mha_layer_options *o, void *b, size_t n,
                          mha_error *e) {
  return 3;
}
size_t mha_layer_view_size(void) { return 1; }
mha_status mha_layer_view(const void *p, size_t n, const mha_layer_options *o, void *s, size_t sn, const mha_layer **l, mha_error *e) {
  return 3;
}
mha_status mha_forward_workspace(const mha_layer *l, const mha_forward_args *a, size_t *b, mha_error *e) { return 3; }
mha_status mha_forward(const mha_layer *l, const mha_forward_args *a, void *w, size_t b, mha_error *e) { return 3; }
mha_status mha_attention_workspace(const mha_attention_args *a, size_t *b, mha_error *e) { return *b = 0, 0; }
mha_status mha_attention(const mha_attention_args *a, void *w, size_t b, mha_error *e) {
  static int calls;
  const int round = (calls++ - 2) / 4;
  const double milliseconds = round % 2 ? ODD : EVEN, begin = now();
  for (int64_t i = 0; i < a->batch * a->n_q * a->num_heads * a->head_dim; ++i) ((float *)a->output)[i] = OUTPUT;
  while (now() - begin < milliseconds) continue;
  return 0;
}
"""


def run(*command):
    return subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def must(*command):
    done = run(*command)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")


def slow_down(folder, percent):
    """Makes the projection so much slower, for each instruction set."""
    paths = sorted((folder / "src" / "kernels").glob("*.cpp"))
    if not paths:
        sys.exit(f"{folder}/src/kernels has no .cpp file; bring slow_down() in perf_gate_test.py up to date.")
    for path in paths:
        text = path.read_text()
        if "make_code_kernels" in text:  # for projections in integers alone
            continue
        text, tables = re.subn(r"= (make_kernels<Vector>\([^;]+\));", r"= slowed(\1);", text)
        text, namespaces = re.subn(r"^namespace mha \{", slowed_kernel.strip().replace("PERCENT", str(percent)), text, flags=re.MULTILINE)
        if tables == 0 or namespaces != 1:
            sys.exit(f"{path.name} no longer looks as this test expects: its tables are not made by make_kernels<Vector>(...) in one "
                     "namespace mha. Bring slow_down() in perf_gate_test.py up to date.")
        path.write_text(text)


def move_fields(folder):
    """Makes fields of the arguments change places. A gate that gives both libraries the same bytes would find another function then."""
    header = folder / "include" / "mha.h"
    text, count = re.subn(r"(  int64_t batch;[^\n]*\n)(  int64_t n_q;[^\n]*\n)", r"\2\1", header.read_text())
    if count != 2:
        sys.exit("The arguments in mha.h no longer begin with batch and n_q; bring move_fields() in perf_gate_test.py up to date.")
    header.write_text(text)


class Gate:
    def __init__(self, work):
        self.work = work
        self.script = work / "repository" / "tools" / "perf_gate.sh"
        self.json = work / "result.json"

    def __call__(self, expected, *arguments, says="", tries=1):
        """Runs the gate, which has to end with the expected status and to say something. More tries are for where it is too noisy."""
        command = f"tools/perf_gate.sh {' '.join(map(str, arguments))}"
        while True:
            self.json.unlink(missing_ok=True)
            done = run(self.script, "--build", self.work / "build", "--json", self.json, *arguments)
            print(f"$ {command}\n{done.stdout}{done.stderr}exit status {done.returncode}\n", flush=True)
            tries -= 1
            if done.returncode != 3 or tries == 0:
                break
        if done.returncode != expected:
            sys.exit(f"{command} ended with status {done.returncode} instead of {expected}.")
        if says not in done.stdout + done.stderr:
            sys.exit(f"{command} does not say '{says}'.")
        if expected in (2, 4, 5) and (done.stdout or self.json.exists()):
            sys.exit(f"{command} cannot measure, and reports something all the same.")

    def verdicts(self):
        return {shape["shape"]: shape["verdict"] for shape in json.loads(self.json.read_text())["shapes"]}

    def shapes(self, *lines):
        path = self.work / "shapes.txt"
        path.write_text("# what the test measures\n" + "\n".join(lines) + "\n")
        return path


def prepare(arguments):
    shutil.rmtree(arguments.work, ignore_errors=True)
    repository = arguments.work / "repository"
    for folder in ("include", "src", "bench", "tests/support", "tools/perf_gate"):
        shutil.copytree(arguments.source / folder, repository / folder)
    for file in ("CMakeLists.txt", "tools/perf_gate.sh"):
        shutil.copy(arguments.source / file, repository / file)
    # Its versions have the kernels that are counted alone, and the scalar ones, little optimised, so that they compile in a third of the time.
    lists = repository / "src" / "CMakeLists.txt"
    lists.write_text('set(MHA_AVX512 OFF)\nset(CMAKE_CXX_FLAGS_RELEASE "-O1 -DNDEBUG")\n' + lists.read_text().replace("-Os,-O2>", "-Os,-O1>"))
    settings = ["user.name=perf_gate_test", "user.email=perf_gate_test@localhost", "core.hooksPath=/dev/null"]
    git = ["git", "-C", repository, *(word for setting in settings for word in ("-c", setting))]
    must(*git, "init", "--quiet")

    def commit(tag):
        must(*git, "add", "--all", "--force")
        must(*git, "commit", "--quiet", "--no-gpg-sign", "--message", tag)
        must(*git, "tag", tag)

    commit("base")
    for percent in (3, 25):
        slow_down(repository, percent)
        move_fields(repository)
        commit(f"slow{percent}")
        must(*git, "checkout", "--quiet", "base", "--", ".")
    with open(repository / "include" / "mha.h", "a") as header:
        header.write("#error this revision does not compile\n")
    commit("broken")
    must(*git, "checkout", "--quiet", "base")


def count(gate, arguments):
    """Counting finds 3% more instructions in the projection, and none in two builds of the same sources."""
    layer, attention = "layer B=1 n=128 D=192 H=3 causal", "attention B=1 n=64 H=2 head_dim=64"
    shapes = gate.shapes(layer, attention)
    markdown = gate.work / "summary.md"
    markdown.write_text("before\n")
    gate(0, "--count", "--shapes", shapes, "--markdown", markdown, "base", says="No regression")
    text = markdown.read_text()
    if not text.startswith("before\n") or f"| {layer} instruction_set=avx2 |" not in text or "the working tree" not in text:
        sys.exit(f"The summary in Markdown is not appended, or not complete:\n{text}")
    gate(1, "--count", "--shapes", shapes, "base", "slow3", says="Regression in 1 of 2 shapes")
    expected = {f"{layer} instruction_set=avx2": "regression", f"{attention} instruction_set=avx2": "ok"}
    if gate.verdicts() != expected:
        sys.exit(f"The verdicts are {gate.verdicts()}; they should be {expected}.")
    gate(0, "--count", "--threshold", "10%", "--shapes", shapes, "base", "slow3")
    # Decoding has one row, of which the slow version computes another one.
    layer, attention = "layer n=1 past=64 D=192 H=3 causal", "attention n=1 past=64 H=4 kv_heads=2 head_dim=64 kv_type=int8"
    gate(1, "--count", "--shapes", gate.shapes(layer, attention), "base", "slow3", says="Regression in 1 of 2 shapes")
    expected = {f"{layer} instruction_set=avx2": "regression", f"{attention} instruction_set=avx2": "ok"}
    if gate.verdicts() != expected:
        sys.exit(f"The verdicts are {gate.verdicts()}; they should be {expected}.")


def time(gate, arguments):
    """Timing finds a projection slowed by 25%, and lets two builds of the same sources pass."""
    layer, attention = "layer B=1 n=128 D=768 H=12 causal", "attention B=1 n=512 H=4 head_dim=64"
    shapes = gate.shapes(layer, attention)
    gate(0, "--shapes", shapes, "base", says="No regression", tries=3)
    gate(1, "--shapes", shapes, "base", "slow25", says="Regression in 1 of 2 shapes", tries=3)
    expected = {layer: "regression", attention: "ok"}
    if gate.verdicts() != expected:
        sys.exit(f"The verdicts are {gate.verdicts()}; they should be {expected}.")


def bad_input(gate, arguments):
    """Each thing that cannot be measured is a sentence and a status of its own, and no number."""

    def library(name, version=100, sets="~0u", output="1.0f", even=6.4, odd=6.4):
        source, path = gate.work / f"{name}.c", gate.work / f"{name}.so"
        source.write_text(stub)
        must(arguments.cc, "-shared", "-fPIC", "-I", gate.work / "repository" / "include", f"-DVERSION={version}", f"-DOUTPUT={output}",
             f"-DSETS={sets}", f"-DEVEN={even}", f"-DODD={odd}", source, "-o", path)
        return path

    steady = library("steady")
    shapes = gate.shapes("attention n=1 H=1 head_dim=16  # small")
    gate(0, "--shapes", shapes, steady, steady, says="No regression")
    gate(1, "--shapes", shapes, steady, library("slower", even=8, odd=8), says="Regression in 1 of 1 shapes")
    # One round a quarter faster, one a quarter slower.
    gate(3, "--shapes", shapes, steady, library("unsteady", even=5, odd=8), says="Too noisy to say")

    gate(2, says="a base and at most one version")
    gate(2, steady, steady, steady, says="3 were given")
    gate(2, "--fast", steady, says="'--fast' is not an option")
    gate(2, steady, "--shapes", says="--shapes needs a value")
    gate(2, "--threshold", "0%", steady, steady, says="no percentage above 0")
    gate(2, "--rounds", "6", steady, steady, says="from 7 to")

    gate(4, "no-such-revision", says="neither a file nor a revision")

    this = dict(re.findall(r"^(vendor_id|cpu family)\s*: (.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE))
    floor = gate.work / "floor.txt"
    for family, status, sentence in (("1" + this["cpu family"], 5, "has no floor for this processor"),
                                     (this["cpu family"], 4, "'no-such-floor' is neither a file nor a revision")):
        floor.write_text(f"# kind\nthis {this['vendor_id']} {family} 0,1-999 no-such-floor\n")
        gate(status, "--floor", floor, steady, says=sentence)
    gate(2, "--floor", floor, steady, steady, says="at most one version")
    gate(2, "--floor", floor, "--count", steady, says="about time")
    floor.write_text("zen3 4581ea6\n")
    gate(4, "--floor", floor, steady, says="a line has a kind, a vendor")
    gate(4, "broken", says="does not build")
    gate(4, gate.work / "steady.c", steady, says="cannot be loaded")
    gate(4, steady, library("next", version=10000), says="is version 1.0.0")
    gate(4, "--shapes", shapes, steady, library("other", output="1.01f"), says="do not compute the same function")
    gate(4, "--shapes", shapes, steady, library("nan", output="0.0f / 0.0f"), says="not all finite")

    gate(4, "--shapes", gate.work / "no-such-file", steady, steady, says="no-such-file' cannot be opened")
    gate(4, "--shapes", gate.shapes(), steady, steady, says="has no shape")
    for line, sentence in (
            ("latency n=1", "'latency' is no kind of shape"), ("layer n=0 D=768 H=12", "'n=0' is no size"),
            ("layer n=1 D=768 H=12 n_kv=3", "'n_kv=3' is no word"), ("layer n=1 D=768", "a layer needs H="),
            ("layer n=1 D=768 H=10", "H does not divide D"),
            ("attention n=1 H=1 head_dim=8 instruction_set=sse", "'sse' is no instruction set"),
            ("attention n=2147483647 H=2147483647 head_dim=64", "more than half of this machine's"),
            ("attention n=1 H=1 head_dim=16 threads=100000", "more threads than this machine"),
            ("layer n=1 D=768 H=12", "there are no layers here")):  # says the stub
        gate(4, "--shapes", gate.shapes(line), steady, steady, says=sentence)
    # The stub is as old as versions without KV caches.
    cached = "attention n=1 past=64 H=1 head_dim=16"
    gate(4, "--shapes", gate.shapes(cached), steady, steady, says=f"the shape '{cached}' needs KV caches, which")
    for line, sentence in ((cached + " n_kv=3", "two ways to have keys"), (cached + " kv_type=int4", "'int4' is no type of a cache"),
                           ("attention n=1 H=1 head_dim=16 kv_type=f16", "which past= asks for")):
        gate(4, "--shapes", gate.shapes(line), steady, steady, says=sentence)
    gate(4, "--shapes", gate.shapes("layer n=1 D=768"), steady, steady, says="shapes.txt:2: ")
    gate(4, "--count", "--shapes", gate.shapes("attention n=1 H=1 head_dim=16 instruction_set=avx512"), steady, steady,
         says="which valgrind does not know")
    gate(4, "--count", "--shapes", gate.shapes("attention n=1 H=1 head_dim=16"), steady, library("scalar", sets="2u"),
         says="needs an instruction set that")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog="example: perf_gate_test.py prepare --source . --work /tmp/perf_gate")
    parser.add_argument("test", choices=["prepare", "count", "time", "bad_input"])
    parser.add_argument("--source", type=pathlib.Path, required=True, help="the folder of mha")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="a folder to work in, which prepare empties and fills")
    parser.add_argument("--cc", default="cc", help="the C compiler")
    arguments = parser.parse_args()
    if arguments.test == "prepare":
        return prepare(arguments)
    {"count": count, "time": time, "bad_input": bad_input}[arguments.test](Gate(arguments.work.resolve()), arguments)


if __name__ == "__main__":
    main()
