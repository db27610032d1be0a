# SPDX-License-Identifier: Apache-2.0
"""One folder per model family; `definition` says what a family offers, `registry` finds it by architecture name."""
