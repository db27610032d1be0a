# SPDX-License-Identifier: Apache-2.0
"""`whalefall doctor`: what is installed, what fits together, what is wrong, and the command that mends it.

Facts first (`elf`, `packages`, `machine`), judgement after (`cuda`, `checks`), printing last (`report`). Nothing here imports torch or any
other third-party package except rich for the table: a broken CUDA environment must be readable before the first import fails.
"""
