// Compiled CUDA kernels on disk, shared with Python: kernels/cuda_compile.py keeps them in the same
// folder, under the same names and in the same form.
#ifndef QRNN_CUDA_CACHE_H
#define QRNN_CUDA_CACHE_H

#include <string>
#include <vector>

namespace qrnn {

// `made_of`: the whole source, the compiler's options and its version, so that no upgrade meets old code.
std::string cache_path(int architecture, const std::vector<std::string>& made_of);

// What was kept there, or nothing; a damaged file is nothing, and said.
std::string kept_image(const std::string& path);

// That this is impossible is said once a process.
void keep_image(const std::string& path, const std::string& image);

}  // namespace qrnn

#endif
