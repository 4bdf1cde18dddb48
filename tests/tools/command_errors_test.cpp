// Whatever is wrong with files or arguments, the command says it in one sentence and writes nothing.
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "tools/command_layers.h"

namespace {

using namespace command_test;

// ---- Bad input ------------------------------------------------------------------------------------------------------------------

class BadInput : public Run {
 protected:
  // Runs, and expects a refusal with these words that leaves the folder as it was.
  void ExpectRefused(const std::vector<std::string> &words, const Arguments &more = {}) {
    const std::set<std::string> before = folder_.Names();
    ExpectRefusal(Mha(RunArguments(folder_, p_, more)), words);
    EXPECT_EQ(folder_.Names(), before);
  }

  void ExpectNpyRefused(const std::string &bytes, const std::vector<std::string> &words) {
    folder_.Write("x.npy", bytes);
    std::vector<std::string> all = words;
    all.push_back("x.npy");
    ExpectRefused(all);
  }

  void ExpectWeightsRefused(const std::string &bytes, const std::vector<std::string> &words, const Arguments &more = {}) {
    folder_.Write("layer.safetensors", bytes);
    std::vector<std::string> all = words;
    all.push_back("layer.safetensors");
    ExpectRefused(all, more);
  }
};

TEST_F(BadInput, FilesThatCannotBeRead) {
  unlink((folder_ / "x.npy").c_str());
  ExpectRefused({"x.npy", "No such file"});
  ASSERT_EQ(mkdir((folder_ / "x.npy").c_str(), 0700), 0);
  ExpectRefused({"x.npy", "directory"});
  rmdir((folder_ / "x.npy").c_str());
  ASSERT_EQ(mkfifo((folder_ / "x.npy").c_str(), 0600), 0);
  ExpectRefused({"x.npy", "pipe"});
  unlink((folder_ / "x.npy").c_str());
  WriteInput(folder_, p_);
  unlink((folder_ / "layer.safetensors").c_str());
  ExpectRefused({"layer.safetensors", "No such file"});
}

TEST_F(BadInput, FilesThatAreNoNpy) {
  const std::string good = ReadFile(folder_ / "x.npy");
  ExpectNpyRefused("", {"not a .npy file"});
  ExpectNpyRefused("0.1 0.2 0.3\n", {"not a .npy file"});
  ExpectNpyRefused("PK\x03\x04 and more", {".npz"});
  ExpectNpyRefused(std::string("\x93NUMPY\x09\x00", 8) + good.substr(8), {"version 9"});
  for (const size_t length : {6, 7, 8, 9, 10, 11, 40}) ExpectNpyRefused(good.substr(0, length), {"header"});
  ExpectNpyRefused(good.substr(0, good.size() - 1), {"truncated", "(3, 7, 24)"});
  ExpectNpyRefused(good.substr(0, 128), {"truncated"});
  ExpectNpyRefused(good + "x", {"2017", "2016"});
}

TEST_F(BadInput, NpyHeadersThatLieOrMakeNoSense) {
  const std::string data(2016, '\0');
  const auto with = [&](const std::string &header) { return NpyWithHeader(header, data); };
  ExpectNpyRefused(with(""), {"header"});
  ExpectNpyRefused(with("{}"), {"header"});
  ExpectNpyRefused(with("{'descr': '<f4', 'fortran_order': False}"), {"header"});
  ExpectNpyRefused(with("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (3, 7, 24)}"), {"header"});
  ExpectNpyRefused(with("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 7, 24), 'more': 1}"), {"header"});
  ExpectNpyRefused(with("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 7, 24)} x"), {"header"});
  ExpectNpyRefused(with("{'descr': '<f4', 'fortran_order': None, 'shape': (3, 7, 24)}"), {"header"});
  ExpectNpyRefused(with("{'descr': '<f4"), {"header"});
  ExpectNpyRefused(with("{'descr': '<f4', 'fortran_order': False, 'shape': (3, -7, 24)}"), {"header"});
  ExpectNpyRefused(with("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 7, 24"), {"header"});
  ExpectNpyRefused(with("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999, 24)}"), {"header", "64 bits"});
  ExpectNpyRefused(with("{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775807, 24)}"), {"no file can hold"});
  ExpectNpyRefused(with("{'descr': '<f4', 'fortran_order': False, 'shape': (4, 7, 24)}"), {"(4, 7, 24)", "2016", "2688"});
  ExpectNpyRefused(with("{'descr': '\x1b[31m\n', 'fortran_order': False, 'shape': (3, 7, 24)}"), {"dtype"});
}

TEST_F(BadInput, ArraysOfAnotherKind) {
  const auto of = [](const std::string &descr, const std::string &order, const std::string &shape, size_t bytes) {
    return NpyWithHeader(NpyHeader(descr, order, shape), std::string(bytes, '\0'));
  };
  ExpectNpyRefused(of("'<f8'", "False", "(3, 7, 24)", 4032), {"float64", "float32", "astype"});
  ExpectNpyRefused(of("'<i2'", "False", "(3, 7, 24)", 1008), {"'<i2'", "float32", "float16 or bfloat16", "astype"});
  ExpectNpyRefused(of("'<f2'", "False", "(3, 7, 24)", 1007), {"1007 bytes", "float16", "1008"});
  ExpectNpyRefused(of("'>f4'", "False", "(3, 7, 24)", 2016), {"big-endian"});
  ExpectNpyRefused(of("'<i4'", "False", "(3, 7, 24)", 2016), {"<i4", "float32"});
  ExpectNpyRefused(of("[('a', '<f4'), ('b', '<f4')]", "False", "(3, 7, 12)", 2016), {"structured"});
  ExpectNpyRefused(of("'<f4'", "True", "(21, 24)", 2016), {"Fortran"});
  ExpectNpyRefused(of("'<f4'", "False", "(504,)", 2016), {"(504,)"});
  ExpectNpyRefused(of("'<f4'", "False", "()", 4), {"()"});
  ExpectNpyRefused(of("'<f4'", "False", "(1, 3, 7, 24)", 2016), {"(1, 3, 7, 24)"});
  ExpectNpyRefused(of("'<f4'", "False", "(3, 6, 28)", 2016), {"28", "24", "layer.safetensors"});
}

TEST_F(BadInput, KeysAndValuesThatDoNotFit) {
  const auto write = [&](const std::string &name, const std::vector<int64_t> &shape) {
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    return folder_.Write(name, Npy(shape, std::vector<float>(static_cast<size_t>(count), 0.5f)));
  };
  ExpectRefused({"k.npy", "(2, 7, 24)", "(3, 7, 24)"}, {"--key", write("k.npy", {2, 7, 24})});
  ExpectRefused({"k.npy", "(7, 24)", "(3, 7, 24)"}, {"--key", write("k.npy", {7, 24})});
  ExpectRefused({"k.npy", "23", "24"}, {"--key", write("k.npy", {3, 7, 23})});
  ExpectRefused({"x.npy", "7", "5"}, {"--key", write("k.npy", {3, 5, 24})});  // causal
  ExpectRefused({"v.npy", "8", "7"}, {"--key", write("k.npy", {3, 7, 24}), "--value", write("v.npy", {3, 8, 24})});
  ExpectRefused({"v.npy", "8", "7"}, {"--value", write("v.npy", {3, 8, 24})});
  ExpectRefused({"v.npy", "25", "24"}, {"--value", write("v.npy", {3, 7, 25})});
}

TEST_F(BadInput, FilesThatAreNoSafetensors) {
  const std::string good = ReadFile(folder_ / "layer.safetensors");
  ExpectWeightsRefused("", {"too short"});
  ExpectWeightsRefused(good.substr(0, 7), {"too short"});
  ExpectWeightsRefused(good.substr(0, 8), {"not a .safetensors"});
  ExpectWeightsRefused("PK\x03\x04 this is a file of PyTorch's", {"not a .safetensors"});
  ExpectWeightsRefused(good.substr(0, 100), {"truncated"});
  ExpectWeightsRefused(good.substr(0, good.size() - 1), {"truncated"});
  ExpectWeightsRefused(good + "x", {"1 bytes behind"});
  for (const int byte : {2, 3, 6, 7}) {  // header lengths beyond the file, up to 2^63 and more
    std::string bytes = good;
    bytes[byte] = '\xff';
    ExpectWeightsRefused(bytes, {"header", "bytes"});
  }
}

TEST_F(BadInput, HeadersThatAreNotOnesOfSafetensors) {
  const auto of = [](const std::string &header) { return SafetensorsWithHeader(header, "12345678"); };
  const std::string a = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  ExpectWeightsRefused(of("[" + a + "]"), {"not a .safetensors"});
  ExpectWeightsRefused(of("{" + a), {"not JSON"});
  ExpectWeightsRefused(of("{" + a + "} x"), {"not JSON"});
  ExpectWeightsRefused(of("{" + a + ",}"), {"not JSON"});
  ExpectWeightsRefused(of("{\"\xff\":{}}"), {"not JSON"});
  ExpectWeightsRefused(of("{" + std::string(1, '\0') + "}"), {"not JSON"});
  ExpectWeightsRefused(of("{" + a + "," + a + "}"), {"'a' twice"});
  ExpectWeightsRefused(of(R"({"__metadata__":{},"__metadata__":{},)" + a + "}"), {"twice"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}})"), {"'a'", "'dtype' twice"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":[2]}})"), {"'a'", "lacks"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1}})"), {"'a'", "'more'"});
  ExpectWeightsRefused(of(R"({"a":3})"), {"'a'"});
  ExpectWeightsRefused(of(R"({"a":[]})"), {"'a'"});
  ExpectWeightsRefused(of(R"({"a":null})"), {"'a'"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":4,"shape":[2],"data_offsets":[0,8]}})"), {"'a'", "dtype"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})"), {"'a'", "shape"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})"), {"'a'", "shape"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":["2"],"data_offsets":[0,8]}})"), {"'a'", "shape"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})"), {"'a'", "shape"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8]}})"), {"'a'", "shape"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":[99999999999999999999999],"data_offsets":[0,8]}})"), {"'a'", "shape"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})"), {"'a'", "data_offsets"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}})"), {"'a'", "data_offsets"});
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":[[2]],"data_offsets":[0,8]}})"), {"'a'", "shape"});
  ExpectWeightsRefused(of(R"({"__metadata__":{"a":{}}})"), {"__metadata__"});
  ExpectWeightsRefused(of(R"({"__metadata__":{"a":1}})"), {"__metadata__"});
  ExpectWeightsRefused(of(R"({"__metadata__":"a"})"), {"__metadata__"});
  ExpectWeightsRefused(of("{\"a\":" + std::string(1000000, '[')), {"'a'"});
  std::string nested = "{\"a\":";
  for (int i = 0; i < 200000; i++) nested += "{\"a\":";
  ExpectWeightsRefused(of(nested), {"'a'"});
  std::string long_shape = "1";
  for (int i = 0; i < 100000; i++) long_shape += ",1";
  ExpectWeightsRefused(of(R"({"a":{"dtype":"F32","shape":[)" + long_shape + R"(],"data_offsets":[0,8]}})"), {"'a'", "shape"});
}

TEST_F(BadInput, OffsetsThatLie) {
  const auto tensor = [](const std::string &name, const std::string &shape, const std::string &offsets) {
    return "\"" + name + R"(":{"dtype":"F32","shape":[)" + shape + R"(],"data_offsets":[)" + offsets + "]}";
  };
  const auto of = [](const std::string &tensors) { return SafetensorsWithHeader("{" + tensors + "}", std::string(16, '\0')); };
  ExpectWeightsRefused(of(tensor("a", "2", "8,0")), {"'a'", "before"});
  ExpectWeightsRefused(of(tensor("a", "2", "0,16")), {"'a'", "16 bytes", "(2,)"});
  ExpectWeightsRefused(of(tensor("a", "5", "0,20")), {"'a'", "truncated"});
  ExpectWeightsRefused(of(tensor("a", "2", "9223372036854775799,9223372036854775807")), {"'a'", "truncated"});
  ExpectWeightsRefused(of(tensor("a", "4611686018427387906", "0,8")), {"'a'"});  // times 4 is 8, modulo 2^64
  ExpectWeightsRefused(of(tensor("a", "4294967296,4294967296", "0,0")), {"'a'"});
  ExpectWeightsRefused(of(tensor("a", "3", "0,12") + "," + tensor("b", "2", "8,16")), {"'a'", "'b'", "overlap"});
  ExpectWeightsRefused(of(tensor("a", "4", "0,16") + "," + tensor("b", "4", "0,16")), {"'a'", "'b'", "overlap"});
  ExpectWeightsRefused(of(tensor("a", "1", "0,4") + "," + tensor("b", "2", "8,16")), {"4 to 8"});
  ExpectWeightsRefused(of(tensor("a", "2", "0,8")), {"8 bytes behind"});
}

TEST_F(BadInput, NamesCannotAddLinesOrSteerTheTerminal) {
  const auto of = [](const std::string &name) {
    return SafetensorsWithHeader("{\"" + name + R"(":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "12345678");
  };
  ExpectWeightsRefused(of(R"(a\nmha: all is well\u001b[2J)"), {"no attention layer"});
  ExpectWeightsRefused(of(std::string(100000, 'a')), {"no attention layer", "..."});
}

TEST_F(BadInput, TensorsThatAreMissingOrOfAnotherKind) {
  const auto without = [&](const std::string &name) {
    std::vector<Stored> tensors = Linears(p_, "W_query", "W_key", "W_value", "out_proj");
    tensors.erase(std::find_if(tensors.begin(), tensors.end(), [&](const Stored &tensor) { return tensor.name == name; }));
    return tensors;
  };
  const auto with = [&](const Stored &replacement) {
    std::vector<Stored> tensors = without(replacement.name);
    tensors.push_back(replacement);
    return Safetensors(tensors);
  };
  const auto zeros = [](const std::string &name, const std::vector<int64_t> &shape, const std::string &dtype = "F32", size_t size = 4) {
    size_t count = 1;
    for (const int64_t extent : shape) count *= static_cast<size_t>(extent);
    return Stored{name, shape, std::string(count * size, '\0'), dtype};
  };
  ExpectWeightsRefused(Safetensors({}), {"no attention layer"});
  ExpectWeightsRefused(Safetensors(without("W_query.weight")), {"no attention layer"});
  ExpectWeightsRefused(Safetensors(without("W_value.weight")), {"'W_value.weight'"});
  ExpectWeightsRefused(with(zeros("W_key.weight", {24, 24}, "F64", 8)), {"'W_key.weight'", "F64", "F32"});
  ExpectWeightsRefused(with(zeros("W_key.weight", {24, 24}, "I8", 1)), {"'W_key.weight'", "I8", "F32"});
  ExpectWeightsRefused(with(zeros("W_key.weight", {24, 24}, "F4_NEW", 1)), {"'W_key.weight'", "F4_NEW", "F32"});
  ExpectWeightsRefused(with(zeros("W_key.weight", {576})), {"'W_key.weight'", "(576,)"});
  ExpectWeightsRefused(with(zeros("W_key.weight", {2, 12, 24})), {"'W_key.weight'", "(2, 12, 24)"});
  ExpectWeightsRefused(with(zeros("W_key.weight", {0, 24})), {"'W_key.weight'", "(0, 24)"});
  ExpectWeightsRefused(with(zeros("W_key.weight", {23, 24})), {"'W_key.weight'", "23", "6"});
  ExpectWeightsRefused(with(zeros("W_key.weight", {18, 24})), {"'W_key.weight'", "3 key and value heads", "4 query heads"});
  ExpectWeightsRefused(with(zeros("W_key.weight", {48, 24})), {"'W_key.weight'", "8 key and value heads", "4 query heads"});
  ExpectWeightsRefused(with(zeros("W_value.weight", {22, 24})), {"'W_value.weight'", "22", "4"});
  ExpectWeightsRefused(with(zeros("W_key.weight", {24, 23})), {"x.npy", "24", "23"});
  ExpectWeightsRefused(with(zeros("out_proj.weight", {24, 23})), {"'out_proj.weight'", "23", "24"});
  ExpectWeightsRefused(with(zeros("W_query.bias", {23})), {"'W_query.bias'", "(23,)", "(24,)"});
  ExpectWeightsRefused(with(zeros("out_proj.bias", {1, 24})), {"'out_proj.bias'", "(1, 24)", "(24,)"});
}

TEST_F(BadInput, HeadsThatDoNotFit) {
  p_.num_heads = 5;
  ExpectRefused({"layer.safetensors", "'W_query.weight'", "5 heads"});
  p_.num_heads = INT64_MAX;
  ExpectRefused({"layer.safetensors", "'W_query.weight'", "9223372036854775807 heads"});
  p_.num_heads = 4;
  ExpectRefused({"layer.safetensors", "'W_key.weight'", "--kv-heads says 2"}, {"--kv-heads", "2"});
  ExpectRefused({"layer.safetensors", "'W_query.weight'", "5"}, {"--head-dim", "5"});
  ExpectRefused({"layer.safetensors", "'W_query.weight'", "12"}, {"--head-dim", "12"});
  WriteLayer(folder_, Gpt2(p_));
  p_.num_heads = 5;
  ExpectRefused({"layer.safetensors", "'c_attn.weight'", "5 + 5 + 5 heads"});
  p_.num_heads = INT64_MAX;
  ExpectRefused({"layer.safetensors", "'c_attn.weight'"});
  p_.num_heads = 4;
  ExpectRefused({"layer.safetensors", "'c_attn.weight'"}, {"--kv-heads", "9223372036854775807"});
  ExpectRefused({"layer.safetensors", "'c_attn.weight'", "3"}, {"--kv-heads", "3"});
  ExpectRefused({"layer.safetensors", "'c_attn.weight'", "7"}, {"--head-dim", "7"});
  ExpectRefused({"layer.safetensors", "'c_attn.weight'", "12"}, {"--head-dim", "12", "--kv-heads", "4"});
}

TEST_F(BadInput, AWrongNumberOfHeadsSeenAtTheOutputProjection) {
  p_.num_kv_heads = 2;
  p_.head_dim = p_.head_dim_v = 6;
  p_.output_dim = 16;
  p_.w_o.resize(36 * 16);
  const std::vector<Stored> tensors = {StoreTransposed("q", 24, 48, std::vector<float>(24 * 48)),
                                       StoreTransposed("k", 24, 24, std::vector<float>(24 * 24)),
                                       StoreTransposed("v", 24, 24, std::vector<float>(24 * 24)), StoreTransposed("o", 36, 16, p_.w_o)};
  WriteLayer(folder_, tensors);
  const Arguments names = {"--names", "q=q,k=k,v=v,o=o", "--layout", "out-in"};
  ExpectRefused({"'o'", "36 columns", "; --heads 4 makes heads of 12, check it\n"}, names);
  Arguments more = names;
  more.insert(more.end(), {"--kv-heads", "2"});
  ExpectRefused({"'o'", "36 columns", "; --heads 4 --kv-heads 2 make heads of 12, check them\n"}, more);
}

// Read the wrong way, grouped heads look like a cross-attention.
TEST_F(BadInput, AWrongLayoutIsBlamed) {
  p_.batch = 2;
  p_.query_dim = p_.key_dim = p_.value_dim = p_.output_dim = 32;
  p_.num_heads = 8;
  p_.num_kv_heads = 2;
  p_.head_dim = p_.head_dim_v = 4;
  Fill(&p_);
  WriteInput(folder_, p_);
  const auto store = [&](bool is_in_out) {
    if (is_in_out) {
      WriteLayer(folder_, {Store("wq", {32, 32}, p_.w_q), Store("wk", {32, 8}, p_.w_k), Store("wv", {32, 8}, p_.w_v)});
    } else {
      WriteLayer(folder_,
                 {StoreTransposed("wq", 32, 32, p_.w_q), StoreTransposed("wk", 32, 8, p_.w_k), StoreTransposed("wv", 32, 8, p_.w_v)});
    }
  };
  const Arguments wrong = {"--names", "q=wq,k=wk,v=wv", "--layout", "out-in"};
  const std::string sentence = "'wk' is (32, 8); read as out-in it takes rows of 8, but 'wq' takes 32; is it --layout in-out?\n";
  store(true);
  ExpectRefused({"layer.safetensors", sentence}, wrong);
  ExpectRefused({"layer.safetensors", sentence}, {"--names", "q=wq,k=wk,v=wv", "--layout", "out-in", "--kv-heads", "2"});
  ExpectRefusal(Mha({"explain", "--weights", folder_ / "layer.safetensors", "--heads", "8", "--input", folder_ / "x.npy", "--names",
                     "q=wq,k=wk,v=wv", "--layout", "out-in"}),
                {sentence});
  // Rows of 8 for the keys and values show that the layer is a cross-attention indeed.
  const std::string key = folder_.Write("k.npy", Npy({2, p_.n_q, 8}, std::vector<float>(2 * p_.n_q * 8)));
  Arguments cross = wrong;
  cross.insert(cross.end(), {"--key", key});
  EXPECT_EQ(Mha(RunArguments(folder_, p_, cross)).status, 0);
  unlink((folder_ / "y.npy").c_str());
  unlink(key.c_str());

  p_.num_heads = 5;  // whatever does not fit, the layout comes first
  ExpectRefused({sentence}, wrong);
  p_.num_heads = 8;
  store(false);
  ExpectRefused({"'wk' is (8, 32); read as in-out it takes rows of 8, but 'wq' takes 32; is it --layout out-in?\n"},
                {"--names", "q=wq,k=wk,v=wv", "--layout", "in-out"});
}

TEST_F(BadInput, NamesThatMakeNoSense) {
  for (const std::string names : {"", "q", "q=", "=a", "q=a,q=b", "z=a", "q=W_query.weight", "qkv=W_query.weight,q=W_query.weight"}) {
    if (names.empty()) continue;
    ExpectRefusal(Mha(RunArguments(folder_, p_, {"--names", names, "--layout", "in-out"})), {});
  }
  ExpectRefused({"layer.safetensors", "'nothing'"}, {"--names", "q=nothing,k=W_key.weight,v=W_value.weight", "--layout", "in-out"});
  ExpectRefused({"--layout"}, {"--names", "q=W_query.weight,k=W_key.weight,v=W_value.weight"});
}

TEST_F(BadInput, OutputsThatCannotBeWritten) {
  const auto to = [&](const std::string &output) {
    const std::set<std::string> before = folder_.Names();
    Arguments arguments = RunArguments(folder_, p_);
    for (std::string &argument : arguments) {
      if (argument == folder_ / "y.npy") argument = output;
    }
    const Result result = Mha(arguments);
    EXPECT_EQ(folder_.Names(), before);
    return result;
  };
  ExpectRefusal(to(folder_ / "missing/y.npy"), {"missing/y.npy", "cannot be written"});
  ExpectRefusal(to(folder_ / "x.npy/y.npy"), {"x.npy/y.npy", "cannot be written"});
  ExpectRefusal(to(folder_ / ""), {"directory"});
  ExpectRefusal(to("/dev/full"), {"/dev/full", "cannot be written"});
  EXPECT_EQ(to("/dev/null").status, 0);
}

TEST_F(BadInput, AFailedRunKeepsTheOldOutput) {
  folder_.Write("y.npy", "old");
  p_.num_heads = 5;
  ExpectRefused({"W_query"});
  EXPECT_EQ(ReadFile(folder_ / "y.npy"), "old");
}

TEST_F(BadInput, DamagedFilesNeverCrashTheCommand) {
  support::Random random(7);
  const std::string weights = ReadFile(folder_ / "layer.safetensors");
  const std::string input = ReadFile(folder_ / "x.npy");
  const size_t header = weights.find("}}") + 2;
  for (int round = 0; round < 150; round++) {
    const bool damages_weights = round % 3 != 0;
    std::string bytes = damages_weights ? weights : input;
    const size_t end = damages_weights ? header : 128;
    for (int64_t changes = random.Between(1, 3); changes > 0; changes--) {
      const size_t at = static_cast<size_t>(random.Between(0, static_cast<int64_t>(end) - 1));
      switch (random.Between(0, 3)) {
        case 0:
          bytes[at] = static_cast<char>(random.Next());
          break;
        case 1:
          bytes[at] = random.Pick({'0', '9', '-', '"', '{', '[', ']', '}', ',', ':'});
          break;
        case 2:
          bytes.erase(at, 1);
          break;
        default:
          bytes.insert(at, 1, random.Pick({'0', '9', '[', '{', '"'}));
      }
    }
    folder_.Write("layer.safetensors", damages_weights ? bytes : weights);
    folder_.Write("x.npy", damages_weights ? input : bytes);
    const Result result = Mha(RunArguments(folder_, p_));
    if (result.status != 0) ExpectRefusal(result, {damages_weights ? "layer.safetensors" : "x.npy"});
    if (result.status == 0) unlink((folder_ / "y.npy").c_str());
    EXPECT_EQ(folder_.Names(), (std::set<std::string>{"layer.safetensors", "x.npy"}));
    if (HasFailure()) FAIL() << "in round " << round;
  }
}

// ---- Usage ----------------------------------------------------------------------------------------------------------------------

TEST(Usage, HelpOfEachSubCommandHasAnExample) {
  for (const Arguments &arguments : {Arguments{}, {"explain"}, {"run"}, {"pack"}, {"verify"}, {"info"}}) {
    Arguments with_help = arguments;
    with_help.push_back("--help");
    const Result result = Mha(with_help);
    EXPECT_EQ(result.status, 0);
    EXPECT_EQ(result.err, "");
    EXPECT_NE(result.out.find("Usage: mha"), std::string::npos) << result.out;
    EXPECT_NE(result.out.find("Example"), std::string::npos) << result.out;
    for (const std::string &line : Lines(result.out)) EXPECT_LE(line.size(), 132u) << line;
  }
}

TEST(Usage, WrongArgumentsGetASentence) {
  ExpectRefusal(Mha({}), {"run", "--help"});
  ExpectRefusal(Mha({"rnu"}), {"'rnu'", "run"});
  ExpectRefusal(Mha({"run", "--foo"}), {"--foo"});
  ExpectRefusal(Mha({"--foo"}), {"--foo"});
  ExpectRefusal(Mha({"run", "--heads", "x"}), {"--heads", "'x'"});
  ExpectRefusal(Mha({"run", "--heads", "0"}), {"--heads", "'0'"});
  ExpectRefusal(Mha({"run", "--heads", "-3"}), {"--heads", "'-3'"});
  ExpectRefusal(Mha({"run", "--heads", "1.5"}), {"--heads", "'1.5'"});
  ExpectRefusal(Mha({"run", "--heads", "99999999999999999999"}), {"--heads", "'99999999999999999999'"});
  ExpectRefusal(Mha({"run", "--threads", "0"}), {"--threads", "'0'"});
  ExpectRefusal(Mha({"run", "--threads", "1025"}), {"--threads", "'1025'", "from 1 to 1024"});
  ExpectRefusal(Mha({"run", "--scale", "x"}), {"--scale", "x"});
  ExpectRefusal(Mha({"run", "--layout", "diagonal"}), {"--layout", "'diagonal'", "in-out"});
  ExpectRefusal(Mha({"run", "--back-end", "gpu"}), {"--back-end", "'gpu'", "native"});
  ExpectRefusal(Mha({"run"}), {"--output"});
  ExpectRefusal(Mha({"run", "--output", "y"}), {"--input"});
  ExpectRefusal(Mha({"pack", "--output", "y"}), {"--weights"});
  ExpectRefusal(Mha({"verify"}), {"file"});
}

TEST(Usage, OptionsThatCannotBeRead) {
  ExpectRefusal(Mha({"run", "--wieghts", "x"}), {"mha: there is no option '--wieghts'; mha run --help says more\n"});
  ExpectRefusal(Mha({"verify", "a.mha", "-q"}), {"mha: there is no option '-q'; mha verify --help says more\n"});
  ExpectRefusal(Mha({"--wieghts"}), {"mha: there is no option '--wieghts'; mha --help says more\n"});
  ExpectRefusal(Mha({"run", "x.npy"}), {"mha: 'x.npy' is not expected here; mha run --help says more\n"});
  ExpectRefusal(Mha({"run", "--heads", "4", "--heads", "8"}), {"mha: --heads: is given twice\n"});
  ExpectRefusal(Mha({"pack", "--output", "a", "--output", "b"}), {"mha: --output: is given twice\n"});
  ExpectRefusal(Mha({"run", "--weights"}), {"mha: --weights: a value is expected after it\n"});
  ExpectRefusal(Mha({"run", "--weights", "--heads", "4"}), {"mha: --weights: a value is expected after it\n"});
  ExpectRefusal(Mha({"run", "--weights", "--heads=4"}), {"mha: --weights: a value is expected after it\n"});
  ExpectRefusal(Mha({"run", "--causal=maybe"}), {"mha: --causal: takes no value\n"});
  ExpectRefusal(Mha({"run", "explain"}), {"mha: 'explain' is not expected here; mha run --help says more\n"});
  ExpectRefusal(Mha({"verify", "run"}), {"mha: run: cannot be read"});
  ExpectRefusal(Mha({"run", "--scale", "x"}), {"mha: --scale: a finite number is expected, not 'x'\n"});
}

TEST(Usage, EverythingThatIsMissingIsNamedAtOnce) {
  ExpectRefusal(Mha({"run"}), {"mha: --weights (or --packed), --input and --output are needed\n"});
  ExpectRefusal(Mha({"run", "--packed", "x", "--input", "x"}), {"mha: --output is needed\n"});
  ExpectRefusal(Mha({"run", "--weights", "x", "--output", "y"}), {"mha: --heads and --input are needed; ", "number of heads"});
  ExpectRefusal(Mha({"pack"}), {"mha: --weights, --heads and --output are needed; ", "number of heads"});
  ExpectRefusal(Mha({"explain", "--packed", "x"}), {"mha: --input is needed\n"});
  ExpectRefusal(Mha({"explain", "--input", "x"}), {"mha: --weights (or --packed) is needed\n"});
  ExpectRefusal(Mha({"verify"}), {"mha: the packed file is needed: mha verify FILE\n"});
}

TEST(Usage, HelpIsASubCommandToo) {
  EXPECT_EQ(Mha({"help"}).status, 0);
  EXPECT_EQ(Mha({"help"}).out, Mha({"--help"}).out);
  for (const std::string name : {"explain", "run", "pack", "verify", "info"}) {
    EXPECT_EQ(Mha({"help", name}).status, 0);
    EXPECT_EQ(Mha({"help", name}).out, Mha({name, "--help"}).out);
  }
  ExpectRefusal(Mha({"help", "rnu"}), {"'rnu'"});
  const std::string run = Mha({"help", "run"}).out;
  EXPECT_NE(run.find("No row attends to rows after its own"), std::string::npos) << run;
  EXPECT_NE(run.find("0, which stands for 1 / sqrt(head_dim)"), std::string::npos) << run;
}

TEST(Usage, ScaleMustBeFinite) {
  ExpectRefusal(Mha({"pack", "--output", "y", "--weights", "x", "--heads", "1", "--scale", "nan"}), {"--scale"});
  ExpectRefusal(Mha({"pack", "--output", "y", "--weights", "x", "--heads", "1", "--scale", "inf"}), {"--scale"});
}

TEST(Usage, VersionAndInfo) {
  const Result version = Mha({"--version"});
  EXPECT_EQ(version.status, 0);
  EXPECT_EQ(version.out.rfind("mha ", 0), 0u) << version.out;
  EXPECT_NE(version.out.find("contract"), std::string::npos) << version.out;
  const Result info = Mha({"info"});
  EXPECT_EQ(info.status, 0);
  EXPECT_EQ(info.err, "");
  for (const std::string word :
       {"version", "contract", "processor", "caches", "instruction sets", "scalar", "used", "back ends", "native"}) {
    EXPECT_NE(info.out.find(word), std::string::npos) << word;
  }
}

TEST(Usage, OutputThatCannotBePrintedIsAnError) {
  for (const std::string sub_command : {"explain", "info"}) {
    const Result result = Mha({sub_command}, "/dev/full");
    EXPECT_EQ(result.status, 2);
    EXPECT_NE(result.err.find("standard output"), std::string::npos) << result.err;
  }
}

}  // namespace
