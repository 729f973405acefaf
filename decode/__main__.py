"""`python -m decode generate`, which is `acceptance-heads generate`: one prompt through the speculative loop."""

from configs.front import main

if __name__ == "__main__":
    main()
