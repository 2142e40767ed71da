// Tests build a second variant of these files with another text here: GAPLESS_PLAIN leaves out AVX-512.
#pragma once

#ifndef GAPLESS_LIBRARY
#define GAPLESS_LIBRARY gapless
#endif
