// mha pack: the layer as the kernels read it, in a file that any number of processes can map. mha verify: whether it is still that.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>

#include "commands.h"
#include "error.h"
#include "files.h"
#include "layer.h"
#include "options.h"
#include "terminal.h"

namespace command {
namespace {

struct PackOptions {
  LayerOptions layer;
  std::string output;
  bool is_quiet = false;
};

void pack(const PackOptions &options) {
  check_needed(options.layer, false, {{"--output", options.output}});
  check_output(options.output, files_of(options.layer, {}, {}));
  Progress progress(!options.is_quiet);
  const LayerWeights weights = read_layer_weights(options.layer);
  OutputFile file(options.output);
  progress.stage("packing " + options.layer.weights);
  const PackedLayer packed = pack_layer(weights, options.layer);
  progress.stage("writing " + options.output);
  file.write(packed.data, packed.bytes);
  file.commit();
  progress.clear();
  if (options.is_quiet) return;
  const std::string kind = weights.names.family.empty() ? "named tensors" : weights.names.family;
  const std::vector<uint8_t> &kept = weights.extras.kept_heads;
  const auto left_out = static_cast<int64_t>(std::count(kept.begin(), kept.end(), 0));
  const std::string without = left_out != 0 ? " without " + count_text(left_out, "head") : "";
  std::fprintf(stderr, "%s, %s%s, %s\n", kind.c_str(), describe(weights.config).c_str(), without.c_str(),
               bytes_text(static_cast<double>(packed.bytes)).c_str());
}

void verify(const std::string &path) {
  if (path.empty()) fail("the packed file is needed: mha verify FILE");
  const MappedFile file(path);
  check_is_packed(file);
  mha_error error;
  check(mha_layer_verify(file.data(), file.size(), &error), error, path);
  std::printf("%s: a packed layer, all weights as they were packed\n", one_line(path).c_str());
}

}  // namespace

void add_pack_command(CLI::App *app) {
  const auto options = std::make_shared<PackOptions>();
  CLI::App *pack_app = app->add_subcommand("pack", "Pack a layer once, for mha run --packed and mha_layer_view");
  add_weight_options(pack_app, &options->layer);
  add_kept_heads_option(pack_app, &options->layer);
  pack_app->add_option("--output", options->output, "Where the packed layer goes (.mha)")->type_name("FILE")->group(kInput);
  add_weight_type_option(pack_app, &options->layer);
  add_back_end_option(pack_app, &options->layer);
  pack_app->add_flag("--quiet", options->is_quiet, "No progress, no line about the layer");
  pack_app->footer(R"(
One packed file serves every machine of this byte order, whatever its instruction sets.

Examples:
  mha pack --weights layer.safetensors --heads 12 --output layer.mha
  mha pack --weights layer.safetensors --heads 12 --weight-type int8 --output layer.mha
  mha pack --weights layer.safetensors --heads 12 --weight-type int8 --arithmetic int16 --output layer.mha
  mha pack --weights gpt2.safetensors --layer h.0 --heads 12 --output h.0.mha
  mha run --packed layer.mha --input x.npy --output y.npy)");
  pack_app->callback([options] { pack(*options); });
}

void add_verify_command(CLI::App *app) {
  const auto path = std::make_shared<std::string>();
  CLI::App *verify_app = app->add_subcommand("verify", "Check a packed layer, all of its weights included");
  verify_app->add_option("file", *path, "A layer that mha pack wrote (.mha)")->type_name("FILE");
  verify_app->footer("\nExample:\n  mha verify layer.mha");
  verify_app->callback([path] { verify(*path); });
}

}  // namespace command
