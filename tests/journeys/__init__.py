"""Journeys: checkpoints through the peers' own programs, as their users go, and back.

A journey takes a checkpoint of the hub (a tiny model of transformers with random values) into a peer's program with the
peer's registered model and default settings, only smaller: the peer's own loader, strict; real steps of training in
which every buffer moves; the peer's own way of saving; back to the hub; transformers. At its end is the question of a
user: are the logits those of the trainer? What is compared is the complete state of the peer: parameters, buffers
persistent or not, names that live and names that are saved, optimizer, files. A step that cannot be exact is refused,
with a sentence that a user can act on; none ends in other logits.

A test of a journey takes the fixture `journey` (`record.Journey`), which notes each step and its verdict, in a module
with `PEER`, the distribution whose version is noted. Its name is that of the test, after the id of its parameters. A
test with the mark `sampled` runs in `make test` too; all others get the mark `journey`, for `make journeys`, which also
writes `docs/reference/journeys.md`. Modules import no peer before a test runs; those whose parameters are read from a
peer's registry give them to `record.chosen` in `pytest_generate_tests`.
"""

OPTION = "--journeys"
"""Option of pytest: a folder in which to write what journeys note."""
