// Exported symbols of the shared library.
#pragma once

#define EJKERNEL_EXPORT extern "C" __attribute__((visibility("default")))
