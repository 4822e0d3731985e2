"""Mistakes that a CPU hides and a card shows: they must show on a simulated device too."""

import torch

DEVICE = torch.device("cuda")
SIDE = torch.cuda.Stream()
TURNS = 20


def wrong(waits: bool, records: bool) -> int:
    """In how many turns a stream reads something other than what the other one wrote."""
    found = 0
    for turn in range(TURNS):
        x = torch.full((1000,), float(turn), device=DEVICE) * 2 + 1
        if waits:
            SIDE.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(SIDE):
            y = x.clone()
            for _ in range(3):
                y = y + x - x
        if records:
            x.record_stream(SIDE)
        del x
        torch.zeros(1000, device=DEVICE)  # takes the memory at once
        torch.cuda.synchronize()
        found += not torch.equal(y.cpu(), torch.full((1000,), 2.0 * turn + 1))
    return found


for text, waits, records in (
    ("without a wait", False, True),
    ("without record_stream", True, False),
    ("with waits and record_stream", True, True),
):
    print(f"{text}: {wrong(waits, records)} of {TURNS} are wrong")
try:
    torch.nn.LSTM(3, 4).to(DEVICE)(torch.randn(2, 1, 3, device=DEVICE))
except RuntimeError as error:
    print(error)
