# SPDX-License-Identifier: Apache-2.0
"""The tiers below the device's blocks: host memory and a disk (or an object store) that survives restarts.

                  scheduler's thread                                  background threads
    ledger.py     what is where, what moves, who waits   ── moves ──►  mover.py    three lanes: copy, read, write
    host_book.py  rows of the host tier, LRU, pins       ◄─ reports ─  record.py   blocks <-> records in one host slab
    cost.py       is loading faster than computing?                    disk.py     one file per block, named by its key
    moves.py      the words between the two                            objects.py  the same behind a URL; store.py what both promise

Left of the arrows are integers and keys only: no tensor, no clock, no file. Right of them nothing is decided. layout.py says what a
record is.
"""
