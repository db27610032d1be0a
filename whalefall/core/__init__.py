# SPDX-License-Identifier: Apache-2.0
"""The words everybody speaks: plain data and the small protocols at the seams. Imports nothing of ours."""
