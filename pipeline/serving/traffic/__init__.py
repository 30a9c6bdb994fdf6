"""Traffic between a champion and a challenger."""
