"""What happens on a signal, an error, a stall or a lost rank: how all ranks stop or end together."""
