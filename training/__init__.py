# SPDX-License-Identifier: Apache-2.0
"""How Krill, the small model that ships with Whalefall, is made: data, model, training, export, evaluation. Not part of the package."""
