#include "cuda_cache.h"

#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

#include "sha256.h"

namespace qrnn {
namespace {

constexpr size_t kDigestBytes = 32;

std::string folder() {
    const auto given = [](const char* variable) {
        const char* value = std::getenv(variable);
        return std::string(value ? value : "");
    };
    const std::string chosen = given("QRNN_SERVE_CACHE_DIR");
    if (!chosen.empty()) return chosen;
    std::string caches = given("XDG_CACHE_HOME");
    if (caches.empty()) {
        std::string home = given("HOME");
        const passwd* user = home.empty() ? getpwuid(getuid()) : nullptr;
        if (user) home = user->pw_dir;
        caches = home + "/.cache";
    }
    return caches + "/qrnn-serve";
}

std::string in_hexadecimal(const std::string& bytes) {
    std::string text;
    for (const unsigned char byte : bytes) {
        text += "0123456789abcdef"[byte / 16];
        text += "0123456789abcdef"[byte % 16];
    }
    return text;
}

// The folder of a path and those above it.
bool make_folders(const std::string& path) {
    for (size_t end = path.find('/', 1); end != std::string::npos; end = path.find('/', end + 1)) {
        if (mkdir(path.substr(0, end).c_str(), 0700) != 0 && errno != EEXIST) return false;
    }
    return true;
}

bool write_all(int file, const std::string& content) {
    for (size_t done = 0; done < content.size();) {
        const ssize_t count = write(file, content.data() + done, content.size() - done);
        if (count < 0 && errno != EINTR) return false;
        if (count > 0) done += static_cast<size_t>(count);
    }
    return true;
}

// Written aside and renamed, so that no process ever reads half a file.
bool replace_file(const std::string& path, const std::string& content) {
    if (!make_folders(path)) return false;
    std::string aside = path;
    aside.insert(aside.rfind('/') + 1, ".");
    aside += ".XXXXXX";
    const int file = mkstemp(aside.data());
    if (file < 0) return false;
    const bool written = write_all(file, content);
    const int written_error = errno;
    const bool closed = close(file) == 0;
    if (written && closed && std::rename(aside.c_str(), path.c_str()) == 0) return true;
    const int error = written ? errno : written_error;
    unlink(aside.c_str());
    errno = error;
    return false;
}

}  // namespace

std::string cache_path(int architecture, const std::vector<std::string>& made_of) {
    std::string text;
    for (const std::string& part : made_of) {
        if (&part != &made_of.front()) text += '\0';
        text += part;
    }
    return folder() + "/qrnn-sm" + std::to_string(architecture) + "-" +
           in_hexadecimal(sha256(text)).substr(0, 32) + ".cubin";
}

std::string kept_image(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) return "";
    const std::string content{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    // The driver takes an address without a length, so a file cut short could take the process down.
    const std::string image = content.size() > kDigestBytes ? content.substr(kDigestBytes) : "";
    if (image.empty() || sha256(image) != content.substr(0, kDigestBytes)) {
        std::fprintf(stderr, "qrnn: %s is damaged: compiling the kernel again\n", path.c_str());
        return "";
    }
    return image;
}

void keep_image(const std::string& path, const std::string& image) {
    if (replace_file(path, sha256(image) + image)) return;
    const int error = errno;
    static std::atomic<bool> said{false};
    if (said.exchange(true)) return;
    std::fprintf(stderr, "qrnn: compiled CUDA kernels cannot be kept in %s: %s\n",
                 path.substr(0, path.rfind('/')).c_str(), std::strerror(error));
}

}  // namespace qrnn
