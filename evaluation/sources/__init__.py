"""Where `Played` comes from beside a replay: real generations on a clock."""
