# SPDX-License-Identifier: Apache-2.0
"""One folder per family of ops. The torch reference defines the op; twins are chosen by the registry."""
