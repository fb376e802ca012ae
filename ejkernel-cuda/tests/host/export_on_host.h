// What Python calls in a library of kernels for a host.
#pragma once

#define EXPORT extern "C" __attribute__((visibility("default")))
