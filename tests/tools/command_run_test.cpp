// What the command computes from files: a run, a run of a packed layer, and token by token over a cache.
#include <gtest/gtest.h>
#include <mha.h>
#include <signal.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tools/command_layers.h"

namespace {

using namespace command_test;

// ---- Running --------------------------------------------------------------------------------------------------------------------

TEST_F(Run, BytesDoNotDependOnThreadsOrInstructionSet) {
  const std::string expected = Output();
  for (const std::string threads : {"2", "3", "16"}) EXPECT_EQ(Output({"--threads", threads}), expected) << threads;
  EXPECT_EQ(Output({"--isa", "auto"}), expected);
  for (const std::string set : {"scalar", "avx2", "avx512", "neon", "avx2_vnni", "avx512_vnni", "neon_dotprod", "neon_i8mm"}) {
    const Result result = Mha(RunArguments(folder_, p_, {"--isa", set}));
    const std::string here = Mha({"info"}).out;
    if (here.find(set) == std::string::npos) {
      ExpectRefusal(result, {"--isa", set});
    } else {
      EXPECT_EQ(result.status, 0) << result.err;
      EXPECT_EQ(ReadFile(folder_ / "y.npy"), expected) << set;
    }
  }
  ExpectRefusal(Mha(RunArguments(folder_, p_, {"--isa", "sse9"})), {"--isa", "sse9"});
}

TEST_F(Run, OutputHasTheRankOfTheInput) {
  folder_.Write("x.npy", Npy({p_.n_q, p_.query_dim}, std::vector<float>(p_.query.begin(), p_.query.begin() + p_.n_q * p_.query_dim)));
  ASSERT_EQ(Mha(RunArguments(folder_, p_)).status, 0);
  std::vector<float> y;
  ExpectNpy(folder_ / "y.npy", {p_.n_q, p_.y_width()}, &y);
  p_.batch = 1;
  ExpectLayer(p_, y);
}

TEST_F(Run, NoRowsGiveNoRows) {
  std::vector<float> y;
  folder_.Write("x.npy", Npy({0, p_.query_dim}, {}));
  ASSERT_EQ(Mha(RunArguments(folder_, p_)).status, 0);
  ExpectNpy(folder_ / "y.npy", {0, p_.y_width()}, &y);
  folder_.Write("x.npy", Npy({0, 5, p_.query_dim}, {}));
  ASSERT_EQ(Mha(RunArguments(folder_, p_)).status, 0);
  ExpectNpy(folder_ / "y.npy", {0, 5, p_.y_width()}, &y);
  folder_.Write("x.npy", Npy({int64_t{1} << 60, 0, p_.query_dim}, {}));
  const Result result = Mha(RunArguments(folder_, p_));
  EXPECT_TRUE(result.status == 0 || result.status == 2) << result.err;
}

TEST_F(Run, CausalCrossAttentionSeesAllKeysFromTheLastRow) {
  p_.n_kv = 11;
  Fill(&p_);
  WriteLayer(folder_, Linears(p_, "W_query", "W_key", "W_value", "out_proj"));
  WriteInput(folder_, p_);
  folder_.Write("k.npy", Npy({p_.batch, p_.n_kv, p_.key_dim}, p_.key));
  ASSERT_EQ(Mha(RunArguments(folder_, p_, {"--key", folder_ / "k.npy"})).status, 0);
  std::vector<float> y;
  ExpectNpy(folder_ / "y.npy", {p_.batch, p_.n_q, p_.y_width()}, &y);
  ExpectLayer(p_, y, true);
}

TEST_F(Run, OpenBlasGivesTheSameWithinTheBound) {
  if (Mha({"info"}).out.find("openblas") == std::string::npos) GTEST_SKIP() << "built without OpenBLAS";
  ASSERT_EQ(Mha(RunArguments(folder_, p_, {"--back-end", "openblas"})).status, 0);
  std::vector<float> y;
  ExpectNpy(folder_ / "y.npy", {p_.batch, p_.n_q, p_.y_width()}, &y);
  ExpectLayer(p_, y);
}

TEST_F(Run, InputsThatAreNotAlignedAreRead) {
  const std::string expected = Output();
  const std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 7, 24)} \n";
  ASSERT_NE((header.size() + 10) % 4, 0u);
  folder_.Write("x.npy", NpyWithHeader(header, BytesOf(p_.query)));
  EXPECT_EQ(Output(), expected);
}

TEST_F(Run, VersionsTwoAndThreeOfNpyAreRead) {
  const std::string expected = Output();
  const std::string header = NpyHeader("'<f4'", "False", "(3, 7, 24)");
  for (const char version : {'\x02', '\x03'}) {
    const std::string length = {static_cast<char>(header.size()), 0, 0, 0};
    folder_.Write("x.npy", std::string("\x93NUMPY") + version + std::string(1, '\0') + length + header + BytesOf(p_.query));
    EXPECT_EQ(Output(), expected);
  }
}

TEST_F(Run, SaysWhatItDidInOneLineUnlessQuiet) {
  const Result result = Mha(RunArguments(folder_, p_));
  ASSERT_EQ(Lines(result.err).size(), 1u);
  for (const std::string word : {"(3, 7, 24)", "1 thread", "GFLOP/s"}) EXPECT_NE(result.err.find(word), std::string::npos) << result.err;
  EXPECT_EQ(Mha(RunArguments(folder_, p_, {"--quiet"})).err, "");
}

TEST_F(Run, ReplacesAFileBehindALinkAndKeepsTheLink) {
  folder_.Write("old.npy", "old");
  ASSERT_EQ(symlink((folder_ / "old.npy").c_str(), (folder_ / "y.npy").c_str()), 0);
  ASSERT_EQ(Mha(RunArguments(folder_, p_)).status, 0);
  struct stat status;
  ASSERT_EQ(lstat((folder_ / "y.npy").c_str(), &status), 0);
  EXPECT_TRUE(S_ISLNK(status.st_mode));
  std::vector<float> y;
  ExpectNpy(folder_ / "old.npy", {p_.batch, p_.n_q, p_.y_width()}, &y);
}

TEST_F(Run, SaysTheHeads) {
  EXPECT_NE(Mha(RunArguments(folder_, p_)).err.find(", 4 heads of 6, "), std::string::npos);
  p_.num_kv_heads = 2;
  Fill(&p_);
  WriteLayer(folder_, Linears(p_, "W_query", "W_key", "W_value", "out_proj"));
  const std::string heads = ", 4 query heads of 6, 2 key heads, ";
  EXPECT_NE(Mha(RunArguments(folder_, p_)).err.find(heads), std::string::npos);
  const Result packed = Mha({"pack", "--weights", folder_ / "layer.safetensors", "--heads", "4", "--output", folder_ / "layer.mha"});
  EXPECT_NE(packed.err.find(heads), std::string::npos) << packed.err;
}

TEST_F(Run, NeverWritesOverAnInput) {
  folder_.Write("k.npy", ReadFile(folder_ / "x.npy"));
  folder_.Write("v.npy", ReadFile(folder_ / "x.npy"));
  ASSERT_EQ(symlink((folder_ / "x.npy").c_str(), (folder_ / "soft.npy").c_str()), 0);
  ASSERT_EQ(link((folder_ / "x.npy").c_str(), (folder_ / "hard.npy").c_str()), 0);
  ASSERT_EQ(Mha({"pack", "--weights", folder_ / "layer.safetensors", "--heads", "4", "--output", folder_ / "layer.mha", "--quiet"}).status,
            0);
  std::map<std::string, std::string> before;
  for (const std::string &name : folder_.Names()) before[name] = ReadFile(folder_ / name);

  const auto expect_refused = [&](Arguments arguments, const std::string &output, const std::string &option) {
    arguments.insert(arguments.end(), {"--output", folder_ / output});
    ExpectRefusal(Mha(arguments), {"mha: --output: " + (folder_ / output) + " is also the " + option + "; name another file\n"});
    std::map<std::string, std::string> after;
    for (const std::string &name : folder_.Names()) after[name] = ReadFile(folder_ / name);
    EXPECT_TRUE(after == before) << output;
  };
  const Arguments inputs = {"--input", folder_ / "x.npy", "--key", folder_ / "k.npy", "--value", folder_ / "v.npy"};
  Arguments run = {"run", "--weights", folder_ / "layer.safetensors", "--heads", "4"};
  run.insert(run.end(), inputs.begin(), inputs.end());
  expect_refused(run, "x.npy", "--input");
  expect_refused(run, "soft.npy", "--input");
  expect_refused(run, "hard.npy", "--input");
  expect_refused(run, "./x.npy", "--input");
  expect_refused(run, "k.npy", "--key");
  expect_refused(run, "v.npy", "--value");
  expect_refused(run, "layer.safetensors", "--weights");
  run = {"run", "--packed", folder_ / "layer.mha"};
  run.insert(run.end(), inputs.begin(), inputs.end());
  expect_refused(run, "layer.mha", "--packed");
  expect_refused({"pack", "--weights", folder_ / "layer.safetensors", "--heads", "4"}, "layer.safetensors", "--weights");
}

TEST_F(Run, DoesNotWriteToStandardOutput) {
  const std::set<std::string> before = folder_.Names();
  ExpectRefusal(Mha({"run", "--weights", folder_ / "layer.safetensors", "--heads", "4", "--input", folder_ / "x.npy", "--output", "-"}),
                {"--output", "standard output", "name a file"});
  ExpectRefusal(Mha({"pack", "--weights", folder_ / "layer.safetensors", "--heads", "4", "--output", "-"}),
                {"--output", "standard output"});
  EXPECT_EQ(folder_.Names(), before);
}

TEST_F(Run, WritesThroughAPipe) {
  const std::string expected = Output();
  ASSERT_EQ(mkfifo((folder_ / "y.npy").c_str(), 0600), 0);
  const pid_t child = StartMha(RunArguments(folder_, p_));
  const int pipe = open((folder_ / "y.npy").c_str(), O_RDONLY);
  EXPECT_EQ(ReadAll(pipe), expected);
  close(pipe);
  EXPECT_EQ(ExitStatus(child), 0);
}

TEST_F(Run, ProgressIsShownOnATerminalOnlyAndIsGoneAtTheEnd) {
  const Result result = MhaOnTerminal(RunArguments(folder_, p_), 80);
  EXPECT_EQ(result.status, 0);
  EXPECT_NE(result.out.find("packing "), std::string::npos);
  EXPECT_NE(result.out.find("\r\x1b[K"), std::string::npos);
  const size_t last = result.out.rfind("\x1b[K");
  EXPECT_NE(result.out.find("GFLOP/s", last), std::string::npos) << "the line was not cleared before the summary";
  EXPECT_EQ(MhaOnTerminal(RunArguments(folder_, p_, {"--quiet"}), 80).out, "");
  EXPECT_EQ(Mha(RunArguments(folder_, p_)).err.find('\x1b'), std::string::npos);
}

TEST_F(Run, AnInterruptedRunLeavesNothing) {
  // Long enough that the signal comes before the end.
  Problem p;
  p.batch = 1;
  p.n_q = 12000;
  Fill(&p);
  WriteInput(folder_, p);
  for (const int number : {SIGTERM, SIGINT}) {
    const pid_t child = StartMha(RunArguments(folder_, p, {"--isa", "scalar"}));
    for (int tries = 0; tries < 20000 && folder_.Names().size() < 3; tries++) usleep(1000);
    EXPECT_EQ(folder_.Names().size(), 3u) << "no temporary file was seen";
    kill(child, number);
    EXPECT_EQ(ExitStatus(child), -1);
    EXPECT_EQ(folder_.Names(), (std::set<std::string>{"layer.safetensors", "x.npy"}));
  }
}

// ---- Packed layers --------------------------------------------------------------------------------------------------------------

class Packed : public Run {
 protected:
  Arguments PackArguments(const Arguments &more = {}) {
    Arguments arguments = {"pack", "--weights", folder_ / "layer.safetensors", "--heads", "4", "--output", folder_ / "layer.mha"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }

  Arguments RunPackedArguments(const Arguments &more = {}) {
    Arguments arguments = {"run",     "--packed", folder_ / "layer.mha", "--input", folder_ / "x.npy", "--output", folder_ / "y.npy",
                           "--causal"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
};

TEST_F(Packed, GivesTheBytesOfTheUnpackedLayer) {
  const std::string expected = Output();
  const Result packed = Mha(PackArguments());
  ASSERT_EQ(packed.status, 0) << packed.err;
  EXPECT_EQ(Lines(packed.err).size(), 1u) << packed.err;
  const Result result = Mha(RunPackedArguments());
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(ReadFile(folder_ / "y.npy"), expected);
}

TEST_F(Packed, KeepsItsScale) {
  const std::string expected = Output({"--scale", "0.125"});
  ASSERT_EQ(Mha(PackArguments({"--scale", "0.125"})).status, 0);
  ASSERT_EQ(Mha(RunPackedArguments()).status, 0);
  EXPECT_EQ(ReadFile(folder_ / "y.npy"), expected);
}

TEST_F(Packed, KeepsTheTypeOfItsWeights) {
  const std::string of_floats = Output();
  for (const char *type : {"f16", "bf16", "int8", "int4"}) {
    const std::string expected = Output({"--weight-type", type});
    EXPECT_NE(expected, of_floats) << type;
    ASSERT_EQ(Mha(PackArguments({"--weight-type", type})).status, 0) << type;
    ASSERT_EQ(Mha({"verify", folder_ / "layer.mha"}).status, 0) << type;
    const Result result = Mha(RunPackedArguments());
    ASSERT_EQ(result.status, 0) << result.err;
    EXPECT_EQ(ReadFile(folder_ / "y.npy"), expected) << type;
  }
  ASSERT_EQ(Mha(PackArguments({"--weight-type", "f32"})).status, 0);
  ASSERT_EQ(Mha(RunPackedArguments()).status, 0);
  EXPECT_EQ(ReadFile(folder_ / "y.npy"), of_floats);
  ExpectRefusal(Mha(PackArguments({"--weight-type", "int5"})), {"--weight-type", "int4", "'int5'"});
  ExpectRefusal(Mha(RunPackedArguments({"--weight-type", "int8"})), {"--weight-type", "--packed"});
}

TEST_F(Packed, KeepsItsArithmetic) {
  const std::string in_floats = Output({"--weight-type", "int8"});
  for (const char *arithmetic : {"int8", "int16"}) {
    const std::string expected = Output({"--weight-type", "int8", "--arithmetic", arithmetic});
    EXPECT_NE(expected, in_floats) << arithmetic;
    ASSERT_EQ(Mha(PackArguments({"--weight-type", "int8", "--arithmetic", arithmetic})).status, 0) << arithmetic;
    ASSERT_EQ(Mha(RunPackedArguments()).status, 0) << arithmetic;
    EXPECT_EQ(ReadFile(folder_ / "y.npy"), expected) << arithmetic;
  }
  ExpectRefusal(Mha(PackArguments({"--arithmetic", "int8"})), {"arithmetic", "MHA_TYPE_INT8"});
  ExpectRefusal(Mha(PackArguments({"--weight-type", "int8", "--arithmetic", "int4"})), {"--arithmetic", "int16"});
  ExpectRefusal(Mha(RunPackedArguments({"--arithmetic", "int8"})), {"--arithmetic", "--packed"});
}

TEST_F(Packed, ForOpenBlasRunsWithOpenBlasOnly) {
  if (Mha({"info"}).out.find("openblas") == std::string::npos) GTEST_SKIP() << "built without OpenBLAS";
  const std::string expected = Output({"--back-end", "openblas"});
  ASSERT_EQ(Mha(PackArguments({"--back-end", "openblas"})).status, 0);
  ExpectRefusal(Mha(RunPackedArguments()), {"layer.mha", "--back-end openblas"});
  ASSERT_EQ(Mha(RunPackedArguments({"--back-end", "openblas"})).status, 0);
  EXPECT_EQ(ReadFile(folder_ / "y.npy"), expected);
  ASSERT_EQ(Mha(PackArguments()).status, 0);
  ExpectRefusal(Mha(RunPackedArguments({"--back-end", "openblas"})), {"layer.mha", "--back-end native"});
}

TEST_F(Packed, IsVerified) {
  ASSERT_EQ(Mha(PackArguments()).status, 0);
  const Result good = Mha({"verify", folder_ / "layer.mha"});
  EXPECT_EQ(good.status, 0) << good.err;
  EXPECT_NE(good.out.find("layer.mha"), std::string::npos) << good.out;
  std::string bytes = ReadFile(folder_ / "layer.mha");
  bytes[bytes.size() / 2] ^= 1;
  folder_.Write("layer.mha", bytes);
  ExpectRefusal(Mha({"verify", folder_ / "layer.mha"}), {"layer.mha"});
}

TEST_F(Packed, ThatIsNoneIsRefused) {
  ASSERT_EQ(Mha(PackArguments()).status, 0);
  const std::string bytes = ReadFile(folder_ / "layer.mha");
  for (const size_t length : {size_t{0}, size_t{1}, size_t{63}, size_t{64}, bytes.size() / 2, bytes.size() - 1}) {
    folder_.Write("layer.mha", bytes.substr(0, length));
    ExpectRefusal(Mha(RunPackedArguments()), {"layer.mha"});
    ExpectRefusal(Mha({"verify", folder_ / "layer.mha"}), {"layer.mha"});
  }
  folder_.Write("layer.mha", ReadFile(folder_ / "layer.safetensors"));
  const std::string sentence = "layer.mha: is no packed layer; mha pack writes one\n";
  ExpectRefusal(Mha(RunPackedArguments()), {sentence});
  ExpectRefusal(Mha({"verify", folder_ / "layer.mha"}), {sentence});
  ExpectRefusal(Mha({"explain", "--packed", folder_ / "layer.mha", "--input", folder_ / "x.npy"}), {sentence});
  ExpectRefusal(Mha(RunPackedArguments({"--heads", "4"})), {"--packed", "--heads"});
  EXPECT_EQ(folder_.Names(), (std::set<std::string>{"layer.mha", "layer.safetensors", "x.npy"}));
}

// What /proc says of one file's mapping in a process, in KiB: {"Rss", 4096}, {"Shared_Clean", ...}, ... Empty = the file is not mapped.
std::map<std::string, int64_t> MappingOf(const std::string &path, pid_t process) {
  std::map<std::string, int64_t> fields;
  std::ifstream smaps("/proc/" + std::to_string(process) + "/smaps");
  bool is_it = false;
  for (std::string line; std::getline(smaps, line);) {
    const size_t colon = line.find(": ");
    const bool is_field = colon != std::string::npos && line.find(' ') > colon;
    if (!is_field) {
      is_it = line.size() > path.size() && line.compare(line.size() - path.size(), path.size(), path) == 0;
      if (is_it) fields["is read-only"] = line.find(" r--") != std::string::npos;
    } else if (is_it) {
      fields[line.substr(0, colon)] += std::strtoll(line.c_str() + colon + 1, nullptr, 10);
    }
  }
  return fields;
}

int64_t AnonymousMemoryOf(pid_t process) {
  std::ifstream rollup("/proc/" + std::to_string(process) + "/smaps_rollup");
  for (std::string line; std::getline(rollup, line);) {
    if (line.rfind("Anonymous:", 0) == 0) return std::strtoll(line.c_str() + 10, nullptr, 10);
  }
  return -1;
}

// Two commands over one packed file, both caught after their work: each writes its output into a pipe that nobody empties.
TEST_F(Packed, IsMappedAndSharedByProcessesWithoutACopy) {
  p_ = {};
  p_.batch = 1;
  p_.n_q = 64;  // 256 KiB of output, more than a pipe holds
  p_.query_dim = p_.key_dim = p_.value_dim = p_.output_dim = 1024;
  p_.head_dim = p_.head_dim_v = 256;
  p_.has_bias = false;
  Fill(&p_);
  WriteLayer(folder_, Linears(p_, "W_query", "W_key", "W_value", "out_proj"));
  WriteInput(folder_, p_);
  ASSERT_EQ(Mha(PackArguments()).status, 0);
  const std::string expected = Output();
  const std::string path = folder_ / "layer.mha";
  struct stat status;
  ASSERT_EQ(stat(path.c_str(), &status), 0);
  const int64_t kib = status.st_size / 1024;
  ASSERT_GE(kib, 16 * 1024);

  pid_t children[2];
  int pipes[2];
  for (int i = 0; i < 2; i++) {
    const std::string pipe = folder_ / ("pipe" + std::to_string(i));
    ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
    Arguments arguments = RunPackedArguments();
    for (std::string &argument : arguments) {
      if (argument == folder_ / "y.npy") argument = pipe;
    }
    children[i] = StartMha(arguments);
    pipes[i] = open(pipe.c_str(), O_RDONLY);
  }
  // The first bytes come when the work is done.
  char first[2];
  for (int i = 0; i < 2; i++) ASSERT_EQ(read(pipes[i], &first[i], 1), 1);

  for (int i = 0; i < 2; i++) {
    std::map<std::string, int64_t> mapping = MappingOf(path, children[i]);
    ASSERT_FALSE(mapping.empty()) << "the packed file is not mapped";
    EXPECT_EQ(mapping["is read-only"], 1);
    EXPECT_GE(mapping["Rss"], kib * 95 / 100) << "the weights are read in the mapping";
    EXPECT_EQ(mapping["Anonymous"], 0);
    EXPECT_EQ(mapping["Private_Dirty"], 0);
    EXPECT_LE(mapping["Private_Clean"], kib / 20) << "both processes use the same memory";
    EXPECT_LE(mapping["Pss"], kib * 55 / 100) << "each answers for half of it";
    const int64_t anonymous = AnonymousMemoryOf(children[i]);
    EXPECT_GE(anonymous, 0);
    if (!MHA_COMMAND_SANITIZED) {
      EXPECT_LE(anonymous, kib / 2) << "a copy would be here";
    }
    std::printf("process %d: of %lld KiB of packed weights %lld resident, %lld shared, %lld proportional; anonymous memory %lld KiB\n",
                i + 1, static_cast<long long>(kib), static_cast<long long>(mapping["Rss"]),
                static_cast<long long>(mapping["Shared_Clean"] + mapping["Shared_Dirty"]), static_cast<long long>(mapping["Pss"]),
                static_cast<long long>(anonymous));
  }
  for (int i = 0; i < 2; i++) {
    EXPECT_EQ(first[i] + ReadAll(pipes[i]), expected);
    close(pipes[i]);
    EXPECT_EQ(ExitStatus(children[i]), 0);
  }
}

// ---- Decoding -------------------------------------------------------------------------------------------------------------------

class Decode : public Packed {
 protected:
  static Arguments Decoding(const Arguments &more = {}) {
    Arguments arguments = {"--decode"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }

  // The layer anew, of so many rows.
  void Write(int64_t n) {
    p_.n_q = p_.n_kv = n;
    Fill(&p_);
    WriteLayer(folder_, Linears(p_, "W_query", "W_key", "W_value", "out_proj"));
    WriteInput(folder_, p_);
  }
};

TEST_F(Decode, GivesTheBytesOfARunWithoutIt) {
  const std::string expected = Output({"--quiet"});
  EXPECT_EQ(Output(Decoding()), expected);
  for (const std::string prompt : {"1", "2", "6", "7"}) EXPECT_EQ(Output(Decoding({"--quiet", "--prompt", prompt})), expected) << prompt;
  EXPECT_EQ(Output(Decoding({"--quiet", "--cache-type", "f32"})), expected);
  for (const std::string threads : {"2", "3", "64"})
    EXPECT_EQ(Output(Decoding({"--threads", threads, "--prompt", "3"})), expected) << threads;
}

TEST_F(Decode, GivesTheBytesOfARunWithoutItForSeveralChunksOfKeys) {
  Write(530);
  const std::string expected = Output({"--quiet"});
  for (const std::string prompt : {"1", "255", "256", "400"}) {
    EXPECT_EQ(Output(Decoding({"--quiet", "--prompt", prompt})), expected) << prompt;
  }
  EXPECT_EQ(Output(Decoding({"--quiet", "--prompt", "256", "--threads", "2"})), expected);
}

// So wide that every step is shared out.
TEST_F(Decode, GivesTheSameBytesOnThreadsThatAllHaveWorkToDo) {
  p_.batch = 1;
  p_.query_dim = p_.key_dim = p_.value_dim = p_.output_dim = 512;
  p_.num_heads = p_.num_kv_heads = 8;
  p_.head_dim = p_.head_dim_v = 64;
  Write(80);
  const std::string expected = Output({"--quiet"});
  for (const std::string threads : {"2", "5"}) {
    const Result result = Mha(RunArguments(folder_, p_, {"--decode", "--prompt", "40", "--threads", threads}));
    EXPECT_EQ(result.status, 0) << result.err;
    EXPECT_NE(result.err.find(threads + " threads"), std::string::npos) << result.err;
    EXPECT_EQ(ReadFile(folder_ / "y.npy"), expected) << threads;
  }
}

TEST_F(Decode, TakesOneSequenceAsItTakesABatch) {
  folder_.Write("x.npy", Npy({p_.n_q, p_.query_dim}, std::vector<float>(p_.query.begin(), p_.query.begin() + p_.n_q * p_.query_dim)));
  const std::string expected = Output();
  EXPECT_EQ(Output(Decoding()), expected);
  std::vector<float> y;
  ASSERT_EQ(Mha(RunArguments(folder_, p_, {"--decode", "--quiet"})).status, 0);
  ExpectNpy(folder_ / "y.npy", {p_.n_q, p_.y_width()}, &y);
}

TEST_F(Decode, NoRowsGiveNoRows) {
  std::vector<float> y;
  folder_.Write("x.npy", Npy({0, p_.query_dim}, {}));
  ASSERT_EQ(Mha(RunArguments(folder_, p_, {"--decode"})).status, 0);
  ExpectNpy(folder_ / "y.npy", {0, p_.y_width()}, &y);
  folder_.Write("x.npy", Npy({0, 5, p_.query_dim}, {}));
  ASSERT_EQ(Mha(RunArguments(folder_, p_, {"--decode"})).status, 0);
  ExpectNpy(folder_ / "y.npy", {0, 5, p_.y_width()}, &y);
}

TEST_F(Decode, RotatesByThePositionInTheSequence) {
  const std::string prefix = "model.layers.0.self_attn.";
  WriteLayer(folder_, Linears(p_, prefix + "q_proj", prefix + "k_proj", prefix + "v_proj", prefix + "o_proj"));
  const std::string plain = Output({"--no-rope", "--quiet"});
  for (const Arguments &rope : {Arguments{}, {"--rope-style", "interleaved"}, {"--rope-base", "500000", "--rope-dims", "4"}}) {
    const std::string expected = Output(rope);
    EXPECT_NE(expected, plain);
    Arguments decoding = {"--decode", "--prompt", "3"};
    decoding.insert(decoding.end(), rope.begin(), rope.end());
    EXPECT_EQ(Output(decoding), expected);
  }
}

TEST_F(Decode, TakesWeightsOfEveryType) {
  for (const std::string type : {"f16", "bf16", "int8", "int4"}) {
    const std::string expected = Output({"--weight-type", type});
    EXPECT_EQ(Output(Decoding({"--weight-type", type})), expected) << type;
    ASSERT_EQ(Mha(PackArguments({"--weight-type", type})).status, 0) << type;
    ASSERT_EQ(Mha(RunPackedArguments({"--decode", "--prompt", "2"})).status, 0) << type;
    EXPECT_EQ(ReadFile(folder_ / "y.npy"), expected) << type;
  }
}

// What the library gives for all rows at once over a cache of this type.
std::vector<float> ForwardOverACache(Problem p, support::Storage type) {
  p.has_key = p.has_value = false;
  p.k_type = p.v_type = type;
  const support::Layer layer = MakeLayer(p);
  const support::Cache cache(CacheConfigOf(p, {MHA_CACHE_CONTIGUOUS, 0}, p.batch, p.n_q));
  support::LayerCall call;
  call.asked = support::kAskNothing;
  call.cache.cache = cache.get();
  return Forward(layer.get(), p, call).y;
}

TEST_F(Decode, OverACacheOfFewerBitsGivesTheBitsOfThatType) {
  std::set<std::string> different;
  for (const support::Storage type : support::kStorageTypes) {
    const std::string name = NameOf(type);
    const std::vector<float> expected = ForwardOverACache(p_, type);
    for (const std::string prompt : {"1", "4", "7"}) {
      ASSERT_EQ(Mha(RunArguments(folder_, p_, {"--decode", "--quiet", "--cache-type", name, "--prompt", prompt})).status, 0);
      std::vector<float> y;
      ExpectNpy(folder_ / "y.npy", {p_.batch, p_.n_q, p_.y_width()}, &y);
      EXPECT_EQ(BytesOf(y), BytesOf(expected)) << name << ", prompt of " << prompt;
    }
    different.insert(BytesOf(expected));
  }
  EXPECT_EQ(different.size(), std::size(support::kStorageTypes));
}

TEST_F(Decode, TellsTokensPerSecondAndTheShareOfTheReadBandwidth) {
  const auto told = [this](const Arguments &arguments) { return Mha(RunArguments(folder_, p_, arguments)).err; };
  const std::string line = told({"--decode", "--prompt", "3", "--cache-type", "int8"});
  ASSERT_EQ(Lines(line).size(), 1u) << line;
  for (const std::string word : {"(3, 7, 24)", "1 thread", "cache of int8", "prompt of 3 rows in ", "12 tokens in ", " tokens/s, ",
                                 "% of the read bandwidth (", " GB/s)"}) {
    EXPECT_NE(line.find(word), std::string::npos) << word << " is missing in: " << line;
  }
  const size_t share = line.rfind(' ', line.find("% of the read")), bandwidth = line.find("bandwidth (");
  EXPECT_GE(std::stod(line.substr(share)), 0) << line;
  EXPECT_LE(std::stod(line.substr(share)), 110) << line;
  EXPECT_GT(std::stod(line.substr(bandwidth + 11)), 0.1) << line;
  EXPECT_NE(told({"--decode"}).find("cache of f32, prompt of 1 row in "), std::string::npos);
  EXPECT_EQ(told({"--decode", "--prompt", "7"}).find("tokens"), std::string::npos) << "there are none after the prompt";
  EXPECT_EQ(told({"--decode", "--quiet"}), "");
}

TEST_F(Decode, OptionsThatContradictEachOtherAreRefused) {
  const auto refused = [this](const Arguments &arguments) { return Mha(RunArguments(folder_, p_, arguments)); };
  ExpectRefusal(refused({"--prompt", "3"}), {"mha: --prompt: is an option of --decode, which is not given\n"});
  ExpectRefusal(refused({"--cache-type", "f16"}), {"mha: --cache-type: is an option of --decode, which is not given\n"});
  ExpectRefusal(refused({"--decode", "--cache-type", "int4"}), {"mha: --cache-type: f32, f16, bf16 or int8 is expected, not 'int4'\n"});
  ExpectRefusal(refused({"--decode", "--prompt", "0"}), {"--prompt", "a whole number of at least 1", "'0'"});
  for (const std::string threads : {"1", "2", "64"}) {  // which are there by then, and end
    ExpectRefusal(refused({"--decode", "--prompt", "8", "--threads", threads}), {"mha: --prompt: 8 rows are more than the 7 of ", "x.npy"});
  }
  ExpectRefusal(refused({"--decode", "--key", folder_ / "x.npy"}), {"--decode", "leave out --key"});
  ExpectRefusal(refused({"--decode", "--value", folder_ / "x.npy"}), {"--decode", "leave out --value"});
  p_.is_causal = false;
  ExpectRefusal(refused({"--decode"}), {"mha: --decode: ", "give --causal too"});
  EXPECT_EQ(folder_.Names().count("y.npy"), 0u);
}

}  // namespace
