def mean(numbers):
    return numbers[0]
