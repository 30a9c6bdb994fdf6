"""Models that encode: text, sound and images, alone or before a decoder."""
