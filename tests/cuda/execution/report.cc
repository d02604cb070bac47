#include "report.h"

#include <elf.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "testing.h"

extern "C" const Elf64_Ehdr __ehdr_start __attribute__((visibility("hidden")));

namespace cuda_on_cpu {
namespace {

std::string failure;  // of the launch; empty: none
Reports* collector;

constexpr int kMostPrinted = 5;
int printed;
/// Fails the program at its end, whatever its tests made of it.
struct Verdict {
  ~Verdict() {
    if (!printed) return;
    std::printf("%d launches ended with a report\n", printed);
    std::fflush(stdout);
    _exit(1);
  }
} verdict;

uintptr_t image_start() { return reinterpret_cast<uintptr_t>(&__ehdr_start); }

/// What addr2line prints for an address of this program, line by line joined with " from ".
std::string look_up(uintptr_t address, const char* options) {
  char program[4096];
  const ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
  if (length < 0) return "?";
  program[length] = 0;
  if (__ehdr_start.e_type == ET_DYN) address -= image_start();
  char command[5000];
  std::snprintf(command, sizeof command, "addr2line %s -C -e '%s' %#zx 2>/dev/null", options, program,
                static_cast<size_t>(address));
  FILE* const pipe = popen(command, "r");
  if (!pipe) return "?";
  std::string text;
  char line[1024];
  while (std::fgets(line, sizeof line, pipe)) {
    std::string part(line);
    while (!part.empty() && (part.back() == '\n' || part.back() == '\r')) part.pop_back();
    text += (text.empty() ? "" : " from ") + part.substr(0, part.find(" (discriminator"));
  }
  pclose(pipe);
  return text.empty() ? "?" : text;
}

/// The last parts of a path, which say enough.
std::string shortened(const std::string& path) {
  size_t slash = path.rfind('/');
  if (slash != std::string::npos && slash > 0) slash = path.rfind('/', slash - 1);
  return slash == std::string::npos ? path : path.substr(slash + 1);
}

std::string source_line(PlaceInCode place) {
  if (!place) return "?";
  const std::string lines = look_up(image_start() + place - 1, "-i");  // the call, not what follows it
  std::string text;
  for (size_t at = 0; at < lines.size();) {
    size_t end = lines.find(" from ", at);
    if (end == std::string::npos) end = lines.size();
    text += (at ? " from " : "") + shortened(lines.substr(at, end - at));
    at = end + 6;
  }
  return text;
}

std::string kernel_name() {
  std::string name = look_up(reinterpret_cast<uintptr_t>(machine.kernel), "-f");
  name = name.substr(0, name.find(" from "));
  const std::string anonymous = "(anonymous namespace)::";
  for (size_t at; (at = name.find(anonymous)) != std::string::npos;) name.erase(at, anonymous.size());
  return name.substr(0, name.find('('));
}

constexpr char kOpen[] = "\1", kClose[] = "\2";

std::string with_places(std::string text) {
  for (size_t at; (at = text.find(kOpen)) != std::string::npos;) {
    const size_t end = text.find(kClose, at);
    const PlaceInCode place = static_cast<PlaceInCode>(std::strtoul(text.c_str() + at + 1, nullptr, 10));
    text.replace(at, end + 1 - at, source_line(place));
  }
  return text;
}

}  // namespace

PlaceInCode place_of(const void* return_address) {
  return static_cast<PlaceInCode>(reinterpret_cast<uintptr_t>(return_address) - image_start());
}

std::string placeholder(PlaceInCode place) { return kOpen + std::to_string(place) + kClose; }

std::string file_and_line(const char* file, uint32_t line) { return shortened(file) + ":" + std::to_string(line); }
std::string text_of(const uint3& v) {
  return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")";
}
std::string text_of(const Thread& thread) { return "thread " + text_of(thread.position); }
std::string text_of(const Site& site) {
  return site.operation + (" at " + file_and_line(site.file, static_cast<uint32_t>(site.line)));
}

void fail(const std::string& message) {
  failure = "block " + text_of(current_block_index()) + ", " + text_of(*machine.current) + ": " + message;
  abandon_launch();
}

void report(const std::string& message) {
  if (collector) {
    collector->messages.push_back(message);
  } else if (++printed <= kMostPrinted) {
    std::printf("REPORT %s\n", message.c_str());
    std::fflush(stdout);
  }
}

bool deliver_failure() {
  if (failure.empty()) return false;
  report(kernel_name() + ", " + with_places(failure));
  failure.clear();
  return true;
}

Reports::Reports() : outer_(collector) { collector = this; }
Reports::~Reports() { collector = outer_; }

}  // namespace cuda_on_cpu
