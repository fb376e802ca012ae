// What the shared library shows to the outside.
#pragma once

#define EJKERNEL_EXPORT extern "C" __attribute__((visibility("default")))
