"""Recording what a speculative run would meet at every position of plain decoding's output, and replaying it."""
