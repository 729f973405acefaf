"""`python -m heads export | import | push | inspect`, which are commands of `acceptance-heads`."""

from configs.front import main

if __name__ == "__main__":
    main()
