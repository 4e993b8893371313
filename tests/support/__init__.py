"""What tests share: stores, engines, fleets, clocks and servers."""
