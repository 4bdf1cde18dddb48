// The counting mode: valgrind runs this program once more per library and counts the instructions of one call of each shape.
#pragma once

#include "report.h"

namespace gate {

// The paths are those of the two loaded libraries.
std::vector<Result> count_instructions(std::vector<Shape> shapes, const std::vector<Library> &base_and_new, const std::string paths[2],
                                       double threshold);

// What runs under valgrind: makes the calls that are counted. Lines as in a shapes file.
void make_counted_calls(const Structs &structs, const std::string &library, const std::vector<std::string> &lines);

}  // namespace gate
