"""Between a strategy and Flower's grid: bounded waiting, checked replies, recorded traffic."""
