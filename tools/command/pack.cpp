// mha pack: the layer as the kernels read it, in a file that any number of processes can map.
#include <cstdio>
#include <memory>

#include "commands.h"
#include "error.h"
#include "files.h"

namespace command {
namespace {

struct PackOptions {
  LayerOptions layer;
  std::string output;
  bool is_quiet = false;
};

void pack(const PackOptions &options) {
  if (options.layer.weights.empty()) fail("--weights is needed");
  check_output(options.output, options.layer);
  OutputFile file(options.output);
  const Layer layer(options.layer);
  const std::string call = packed_call(layer.call());
  file.write(layer.bytes(), layer.num_bytes());
  file.write(call.data(), call.size());
  const std::string line = layer.text();
  file.commit();  // after which nothing needs memory
  if (!options.is_quiet)
    std::fprintf(stderr, "%s, %.1f MiB\n", line.c_str(),
                 static_cast<double>(layer.num_bytes()) / (1 << 20));
}

}  // namespace

void add_pack_command(CLI::App *app, Task *task) {
  const auto options = std::make_shared<PackOptions>();
  CLI::App *pack_app =
      app->add_subcommand("pack", "Pack a layer once, for mha run --packed and mha_layer_view");
  add_layer_options(pack_app, &options->layer);
  pack_app->add_option("--output", options->output, "The file for the packed layer (.mha)")
      ->type_name("FILE")
      ->group(kInput);
  pack_app->add_flag("--quiet", options->is_quiet, "Do not print a line about the layer");
  pack_app->footer(R"(
A packed file works on every machine of this byte order, whatever its instruction sets. After the
layer, it stores the call settings as JSON: rotation, norms, sinks, window, causal or not.
mha_layer_view takes the whole file, and reads only the layer.

Examples:
  mha pack --weights model.safetensors --layer layers.0 --output layer.mha   (reads config.json)
  mha pack --weights layer.safetensors --heads 12 --causal --weight-type int8 \
    --arithmetic int16 --output layer.mha
  mha verify layer.mha
  mha run --packed layer.mha --input x.npy --output y.npy)");
  pack_app->callback([=] { *task = [options] { pack(*options); }; });
}

}  // namespace command
